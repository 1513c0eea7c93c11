"""Attention in rows of several documents."""

from dataclasses import dataclass

from llmq.blocks.attention import DenseCore, Heads
from llmq.protocols import Ops, Slots
from llmq.tensor import Slot


@dataclass(frozen=True)
class Packing:
    """Parameters of several documents: at most `max_docs` of them, none of more than `longest` tokens."""

    max_docs: int
    longest: int


class PackedCore(DenseCore):
    """The same within each document of a row: a.batch.borders (B,D+1) says where they begin."""

    def __init__(self, heads: Heads, window: int | None, chunks: int, packing: Packing) -> None:
        super().__init__(heads, window, chunks)
        self.numbers["longest"] = packing.longest

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Results for a batch of b rows of t tokens."""
        h = self.heads
        return (
            Slot("att", (b, t, h.num_heads * h.head_dim), ("att",)),
            Slot("lse", (b, t, h.num_heads), ("att",), "stat"),
        )

    def forward(self, ops: Ops, a: Slots) -> None:
        """a.att (B,T,Hq*Hd), a.lse (B,T,Hq) <- a.rot, a.batch.borders."""
        ops.attention_forward(a.att, a.lse, a.rot, a.batch.borders, **self.numbers)

    def backward(self, ops: Ops, a: Slots, d: Slots) -> None:
        """d.rot <- d.att."""
        for piece in self._pieces(a):
            refs = (d.rot, d.att, a.rot, a.att, a.lse, a.batch.borders)
            ops.attention_backward(*(ref.batch(*piece) for ref in refs), **self.numbers)
