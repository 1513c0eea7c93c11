"""Logits that are multiplied and capped before anything reads them (Gemma 2, Granite)."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llmq.blocks.head import Chunk, LogitsReader
from llmq.protocols import Ops, Slots
from llmq.tensor import Ref, Slot


class Capped(LogitsReader):
    """What `reader` makes of cap * tanh(factor * logits / cap)."""

    def __init__(self, reader: LogitsReader, cap: float, factor: float) -> None:
        self.reader, self.counts = reader, reader.counts
        self.numbers: dict[str, Any] = {"cap": cap, "factor": factor}
        # What slopes follow from: multiples have none, so that the reader may write over their memory.
        self.slopes_of: Callable[[Slots], Ref | None] = (lambda a: a.capped) if math.isfinite(cap) else lambda a: None

    def slots(self, logits: Slot) -> tuple[Slot, ...]:
        """capped, like the logits, beside the slots of the reader."""
        capped = replace(logits, name="capped")
        return (*self.reader.slots(capped), capped)

    def forward(self, ops: Ops, at: Chunk) -> None:
        """What the reader leaves, and at.d.logits, <- at.a.logits."""
        ops.softcap_forward(at.a.capped, at.a.logits, **self.numbers)
        a, d = (frame.renamed({"logits": "capped"}) for frame in (at.a, at.d))
        self.reader.forward(ops, replace(at, a=a, d=d))
        ops.softcap_backward(at.d.logits, at.d.capped, self.slopes_of(at.a), **self.numbers)

    def total(self, ops: Ops, a: Slots) -> None:
        """What the reader leaves of the batch."""
        self.reader.total(ops, a)
