"""Attention sublayer: norm, packed q-k-v projection, rotary, an attention core, projection.

Two parts vary between models and runs and are objects, so that the sublayer stays a straight line: the *rotary* (what
happens to q and k before attention) and the *core* (which keys a query sees).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmq.protocols import Core, Into, Onto, Ops, Parameters, Site, Slots
from llmq.row import Row, SublayerRows
from llmq.tensor import Slot


@dataclass(frozen=True)
class Heads:
    """Head counts: q heads, then k heads, then v heads lie side by side in the packed qkv (B,T,(Hq+2Hkv)*Hd)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None  # of scores: None is 1 / sqrt(Hd)
    cap: float | None = None  # of scores: cap * tanh(score / cap)

    @property
    def scores(self) -> dict[str, float]:
        """What scores are multiplied by and capped at, as keyword numbers of ops."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return {"softmax_scale": scale} | ({} if self.cap is None else {"softcap": self.cap})

    @property
    def numbers(self) -> dict[str, int]:
        """The counts as the keyword numbers of ops."""
        return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}

    @property
    def packed(self) -> int:
        """Width of the packed qkv."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class Unturned:
    """No rotary embedding of its own: the core of generation turns queries and keys. `left` names what it leaves."""

    left = "qkv"

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """No intermediates."""
        return ()

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """Nothing."""


class Rotary:
    """rot = rope(qkv) on q and k heads (Su et al., 2021), by the constant `table`."""

    def __init__(self, heads: Heads, table: str = "rope") -> None:
        self.heads, self.table = heads, table

    @property
    def unturned(self) -> Unturned:
        """The same without the rotary embedding."""
        return Unturned()

    def rows(self, at: SublayerRows) -> Iterator[Row]:
        """No parameters."""
        yield from ()

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Intermediates for a batch of b sequences of t tokens."""
        return (Slot("rot", (b, t, self.heads.packed), ("qkv",)),)

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.rot <- a.qkv."""
        ops.rope_forward(a.rot, a.qkv, a.const[self.table], a.batch.positions, **self.heads.numbers)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """d.qkv <- d.rot."""
        ops.rope_backward(d.qkv, d.rot, a.const[self.table], a.batch.positions, **self.heads.numbers)


class DenseCore:
    """Causal attention within each sequence, whole or in a sliding window; backward in `chunks` pieces of the batch."""

    def __init__(self, heads: Heads, window: int | None, chunks: int) -> None:
        self.heads, self.chunks = heads, chunks
        self.numbers: dict[str, Any] = {**heads.numbers, "window": window, "longest": None, **heads.scores}

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Results for a batch of b sequences of t tokens."""
        h = self.heads
        return (
            Slot("att", (b, t, h.num_heads * h.head_dim), ("att",)),
            Slot("lse", (b, h.num_heads, t), ("att",), "stat"),
        )

    def forward(self, ops: Ops, a: Slots) -> None:
        """a.att (B,T,Hq*Hd), a.lse (B,Hq,T) <- a.rot."""
        ops.attention_forward(a.att, a.lse, a.rot, None, **self.numbers)

    def backward(self, ops: Ops, a: Slots, d: Slots) -> None:
        """d.rot <- d.att."""
        for piece in self._pieces(a):
            d_rot, d_att, rot, att, lse = (ref.batch(*piece) for ref in (d.rot, d.att, a.rot, a.att, a.lse))
            ops.attention_backward(d_rot, d_att, rot, att, lse, None, **self.numbers)

    def _pieces(self, a: Slots) -> list[tuple[int, int]]:
        """First sequence and number of sequences of each piece."""
        count = a.att.shape[0] // self.chunks
        return [(start, count) for start in range(0, a.att.shape[0], count)]


class Attention:
    """out = res + W_o core(rotary(W_qkv rmsnorm(res) + b)), with `into` and `onto` the stream as they are made.

    res, x, out (B,T,C); qkv, rot (B,T,(Hq+2Hkv)*Hd); att (B,T,Hq*Hd); lse as the core keeps it; rstd (B,T).
    """

    def __init__(
        self, hidden_size: int, heads: Heads, into: Into, qkv: Site, rotary: Rotary, core: Core, o: Site, onto: Onto
    ) -> None:
        self.c, self.heads, self.into, self.onto = hidden_size, heads, into, onto
        self.qkv, self.o, self.rotary, self.core = qkv, o, rotary, core

    @property
    def sites(self) -> tuple[Site, ...]:
        """Its linear maps, in the order of the forward pass."""
        return (self.qkv, self.o)

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Intermediates for a batch of b sequences of t tokens."""
        x, *stats = self.into.slots(b, t, self.c)
        qkv = Slot("qkv", (b, t, self.heads.packed), ("qkv",))
        att, *rest = self.core.slots(b, t)
        own = (*self.qkv.slots(x), *self.o.slots(att), *self.onto.slots(b, t, self.c))
        return (x, *stats, qkv, *self.rotary.slots(b, t), att, *rest, *own)

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.out <- a.res."""
        self.into.forward(ops, a, w, self.qkv, a.qkv)
        self.rotary.forward(ops, a, w)
        self.core.forward(ops, a)
        self.onto.forward(ops, a, w, self.o, a.att)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """d.res, dw <- d.out."""
        self.onto.backward(ops, a, d, w, dw, self.o, d.att, a.att)
        self.core.backward(ops, a, d)
        self.rotary.backward(ops, a, d, w, dw)
        self.into.backward(ops, a, d, w, dw, self.qkv, d.qkv)
