"""What reading a model has in place of training's head: logits as they are, log p of targets, or the last hidden state.

All of it is left in tensors of the batch, which stay.
"""

from typing import Any

from llmq.blocks.head import Chunk, Head, LogitsReader
from llmq.protocols import Ops, Parameters, Slots


class TargetScores(LogitsReader):
    """-log p of the targets: a.batch.score (B,T), 0 for those that are ignored; and a.batch.hits (B,T), 1 for those
    that are the most likely token."""

    def __init__(self, vocab_size: int) -> None:
        self.numbers: dict[str, Any] = {"vocab_size": vocab_size, "z_loss": 0.0}

    def forward(self, ops: Ops, at: Chunk) -> None:
        """Those of a chunk <- at.a.logits, targets. The gradient is never made."""
        batch = at.a.batch
        found = (at.of(batch.score), at.of(batch.hits))
        ops.cross_entropy(at.d.logits, *found, at.a.logits, at.of(batch.targets), **self.numbers)


class WholeLogits(LogitsReader):
    """The logits themselves: a.batch.logits (B,T,Vp)."""

    def forward(self, ops: Ops, at: Chunk) -> None:
        """Those of a chunk <- at.a.logits."""
        ops.cast(at.a.batch.logits.chunk(at.start, at.count), at.a.logits)


class HiddenHead(Head):
    """What the head reads: a.batch.hidden (B,T,C), the residual stream after the last norm."""

    def forward(self, ops: Ops, a: Slots, d: Slots, w: Parameters) -> None:
        """It <- a.res."""
        self.norm.forward(ops, a, w)
        ops.cast(a.batch.hidden, a.x)
