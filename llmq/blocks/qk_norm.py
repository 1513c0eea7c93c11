"""What happens to queries and keys before attention in a model that norms them: each head (Qwen 3), or all at once."""

from collections.abc import Iterator
from typing import Any

from llmq.blocks.attention import Heads, Rotary, Unturned
from llmq.blocks.stream import RmsNorm
from llmq.protocols import Ops, Parameters, Slots
from llmq.row import Row, SublayerRows
from llmq.tensor import Slot


class HeadNorms:
    """normed = rmsnorm of each head of q and k (Qwen 3)."""

    def __init__(self, heads: Heads, norm: RmsNorm) -> None:
        self.heads = heads
        self.numbers: dict[str, Any] = {**norm.numbers, **heads.numbers}
        self.back_numbers: dict[str, Any] = {**norm.of_weight, **heads.numbers}

    @property
    def sizes(self) -> tuple[int, int]:
        """Weights of the norm of q and of k."""
        return self.heads.head_dim, self.heads.head_dim

    @property
    def count(self) -> int:
        """Norms of each token."""
        return self.heads.num_heads + self.heads.num_kv_heads

    def rows(self, at: SublayerRows) -> Iterator[Row]:
        """The weights of the norms of queries and keys."""
        for key, size in zip(("q_norm", "k_norm"), self.sizes, strict=True):
            yield at.vector(key, size, f"self_attn.{key}")

    def slots(self, b: int, t: int, roles: tuple[str, ...] = ()) -> tuple[Slot, ...]:
        """Intermediates for b sequences of t tokens."""
        normed = Slot("normed", (b, t, self.heads.packed), roles)
        return normed, Slot("qk_rstd", (b, t, self.count), roles, "stat")

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.normed <- a.qkv."""
        ops.qk_norm_forward(a.normed, a.qk_rstd, a.qkv, w.q_norm, w.k_norm, **self.numbers)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """d.qkv, dw <- d.normed."""
        read = (d.normed, a.qkv, w.q_norm, w.k_norm, a.qk_rstd)
        ops.qk_norm_backward(d.qkv, dw.q_norm, dw.k_norm, *read, **self.back_numbers)


class WideNorms(HeadNorms):
    """normed = rmsnorm of all channels of q, and of all of k (OLMo 2)."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Weights of the norm of q and of k."""
        h = self.heads
        return h.num_heads * h.head_dim, h.num_kv_heads * h.head_dim

    @property
    def count(self) -> int:
        """Norms of each token."""
        return 2

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.normed <- a.qkv."""
        ops.wide_qk_norm_forward(a.normed, a.qk_rstd, a.qkv, w.q_norm, w.k_norm, **self.numbers)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """d.qkv, dw <- d.normed."""
        read = (d.normed, a.qkv, w.q_norm, w.k_norm, a.qk_rstd)
        ops.wide_qk_norm_backward(d.qkv, dw.q_norm, dw.k_norm, *read, **self.back_numbers)


class NormedUnturned(Unturned):
    """The norms without the rotary embedding."""

    left = "normed"

    def __init__(self, norms: HeadNorms) -> None:
        self.slots, self.forward = norms.slots, norms.forward  # type: ignore[method-assign]


class NormedRotary(Rotary):
    """rot = rope(normed) on q and k heads."""

    def __init__(self, norms: HeadNorms, table: str = "rope") -> None:
        super().__init__(norms.heads, table)
        self.norms, self.rows = norms, norms.rows  # type: ignore[method-assign]

    @property
    def unturned(self) -> NormedUnturned:
        """The same without the rotary embedding."""
        return NormedUnturned(self.norms)

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Intermediates for a batch of b sequences of t tokens."""
        return *self.norms.slots(b, t, ("qkv",)), Slot("rot", (b, t, self.heads.packed), ("qkv", "norm"))

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.rot <- a.qkv."""
        self.norms.forward(ops, a, w)
        ops.rope_forward(a.rot, a.normed, a.const[self.table], a.batch.positions, **self.heads.numbers)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """d.qkv, dw <- d.rot."""
        ops.rope_backward(d.normed, d.rot, a.const[self.table], a.batch.positions, **self.heads.numbers)
        self.norms.backward(ops, a, d, w, dw)
