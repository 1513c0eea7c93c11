"""What happens to queries and keys before attention in a model that norms each of their heads (Qwen3)."""

from collections.abc import Iterator

from llmq.blocks.attention import Heads, Rotary, Unturned
from llmq.protocols import Ops, Parameters, Slots
from llmq.row import Row, SublayerRows
from llmq.tensor import Slot


class NormedUnturned(Unturned):
    """rmsnorm per head of q and k (Qwen3), as `NormedRotary` without the rotary embedding."""

    left = "normed"

    def __init__(self, heads: Heads, eps: float) -> None:
        self.heads, self.eps = heads, eps

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Intermediates for b sequences of t tokens."""
        h = self.heads
        rstd = Slot("qk_rstd", (b, t, h.num_heads + h.num_kv_heads), (), "stat")
        return (Slot("normed", (b, t, h.packed)), rstd)

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.normed <- a.qkv."""
        ops.qk_norm_forward(a.normed, a.qk_rstd, a.qkv, w.q_norm, w.k_norm, eps=self.eps, **self.heads.numbers)


class NormedRotary(Rotary):
    """rot = rope(rmsnorm per head(qkv)) on q and k heads (Qwen3)."""

    def __init__(self, heads: Heads, eps: float) -> None:
        super().__init__(heads)
        self.eps = eps

    @property
    def unturned(self) -> NormedUnturned:
        """The same without the rotary embedding."""
        return NormedUnturned(self.heads, self.eps)

    def rows(self, at: SublayerRows) -> Iterator[Row]:
        """The weights of the norms of queries and keys."""
        for key in ("q_norm", "k_norm"):
            yield at.vector(key, self.heads.head_dim, f"self_attn.{key}")

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Intermediates for a batch of b sequences of t tokens."""
        h = self.heads
        return (
            Slot("normed", (b, t, h.packed), ("qkv",)),
            Slot("qk_rstd", (b, t, h.num_heads + h.num_kv_heads), ("qkv",), "stat"),
            Slot("rot", (b, t, h.packed), ("qkv", "norm")),
        )

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.rot <- a.qkv."""
        ops.qk_norm_forward(a.normed, a.qk_rstd, a.qkv, w.q_norm, w.k_norm, eps=self.eps, **self.heads.numbers)
        ops.rope_forward(a.rot, a.normed, a.const.rope, a.batch.positions, **self.heads.numbers)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """d.qkv, dw <- d.rot."""
        ops.rope_backward(d.normed, d.rot, a.const.rope, a.batch.positions, **self.heads.numbers)
        ops.qk_norm_backward(
            d.qkv, dw.q_norm, dw.k_norm, d.normed, a.qkv, w.q_norm, w.k_norm, a.qk_rstd, **self.heads.numbers
        )
