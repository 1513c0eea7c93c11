"""A loss that is a Python function of logits in f32, which are cast for it, as its gradient is for what reads that."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llmq.blocks.head import Chunk, LogitsReader
from llmq.protocols import Ops, Slots
from llmq.tensor import Slot


class OwnLoss(LogitsReader):
    """What `function` makes of a chunk: see the op `own_loss`. a.loss (B,T) per token."""

    def __init__(self, function: Callable[..., tuple[Any, Any]], vocab_size: int) -> None:
        self.numbers: dict[str, Any] = {"function": function, "vocab_size": vocab_size}

    def slots(self, logits: Slot) -> tuple[Slot, ...]:
        """wide (M,Vp): the logits in f32."""
        return (replace(logits, name="wide", dtype="stat"),)

    def forward(self, ops: Ops, at: Chunk) -> None:
        """at.d.logits, the tokens' losses <- at.a.logits, targets."""
        ops.cast(at.a.wide, at.a.logits)
        ops.own_loss(at.d.wide, at.of(at.a.loss), at.a.wide, at.of(at.a.batch.targets), **self.numbers)
        ops.cast(at.d.logits, at.d.wide)

    def total(self, ops: Ops, a: Slots) -> None:
        """The sums of losses and of trained tokens."""
        ops.loss_sum(a.total.loss, a.total.tokens, None, a.loss, a.batch.targets, None)
