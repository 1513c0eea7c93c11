"""Other ways into a sublayer and onto the residual stream than Llama's."""

from collections.abc import Iterator

from llmq.blocks.embed import Embed
from llmq.blocks.stream import Added, Normed, RmsNorm
from llmq.protocols import Ops, Parameters, Site, Slots
from llmq.row import Row, SublayerRows
from llmq.tensor import Ref, Slot


class LayerNorm(RmsNorm):
    """x = layernorm(res) (Ba et al., 2016), with a bias (GPT-2, StarCoder2) or without (Cohere 2)."""

    def __init__(self, eps: float, *, has_bias: bool) -> None:
        super().__init__(eps)
        self.has_bias = has_bias

    def rows(self, at: SublayerRows, size: int, file: str) -> Iterator[Row]:
        """Its weight (C,) and its bias (C,), if it has one."""
        yield from super().rows(at, size, file)
        if self.has_bias:
            yield at.bias("norm_bias", size, file)

    def stats(self, b: int, t: int, roles: tuple[str, ...]) -> tuple[Slot, ...]:
        """What backward needs of b sequences of t tokens: mean and rstd (B,T)."""
        return (Slot("mean", (b, t), roles, "stat"), *super().stats(b, t, roles))

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.x <- a.res."""
        ops.layernorm_forward(a.x, a.mean, a.rstd, a.res, w.norm, w.norm_bias, **self.numbers)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters, through: Ref | None) -> None:
        """d.res, dw <- d.x, and the gradient `through` the stream."""
        read = (d.x, through, a.res, w.norm, a.mean, a.rstd)
        ops.layernorm_backward(d.res, dw.norm, dw.norm_bias, *read)


class SharedNorm(Normed):
    """The first map of attention and that of the MLP read the same x (`Beside`)."""

    def slots(self, b: int, t: int, c: int) -> tuple[Slot, ...]:
        """Beside what the norm has: of_attention and of_both (B,T,C), of which there are only gradients, by x."""
        own = (Slot(name, (b, t, c)) for name in ("of_attention", "of_both"))
        return (*super().slots(b, t, c), *own)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters, site: Site, d_y: Ref) -> None:
        """d.res, dw <- d_y, d.out, and d.x, the MLP's."""
        site.backward(ops, a, d, d.of_attention, getattr(dw, site.key), d_y, a.x, getattr(w, site.key))
        ops.scale(d.of_both, d.of_attention, d.x, factor=1.0)
        self.norm.backward(ops, a, d.renamed({"x": "of_both"}), w, dw, d.out)


class Unnormed:
    """The first map reads the stream itself (OLMo 2)."""

    def rows(self, at: SublayerRows, size: int, file: str) -> Iterator[Row]:
        """No parameters."""
        yield from ()

    def slots(self, b: int, t: int, c: int) -> tuple[Slot, ...]:
        """x (B,T,C), of which there is at most the gradient."""
        return (Slot("x", (b, t, c), ("norm",)),)

    def forward(self, ops: Ops, a: Slots, w: Parameters, site: Site, y: Ref) -> None:
        """y <- a.res."""
        site.forward(ops, a, y, a.res, getattr(w, site.key))

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters, site: Site, d_y: Ref) -> None:
        """d.res, dw <- d_y, d.out."""
        site.backward(ops, a, d, d.x, getattr(dw, site.key), d_y, a.res, getattr(w, site.key))
        ops.scale(d.res, d.x, d.out, factor=1.0)


class Beside(Unnormed):
    """The first map of the MLP reads what attention's reads: both are added to the stream as it was before (GPT-J,
    Cohere)."""

    def forward(self, ops: Ops, a: Slots, w: Parameters, site: Site, y: Ref) -> None:
        """y <- attention's a.x."""
        site.forward(ops, a, y, a.attention_x, getattr(w, site.key))

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters, site: Site, d_y: Ref) -> None:
        """d.res, attention's d.x, dw <- d_y, d.out."""
        site.backward(ops, a, d, d.attention_x, getattr(dw, site.key), d_y, a.attention_x, getattr(w, site.key))
        ops.scale(d.res, d.out, None, factor=1.0)


class Scaled(Added):
    """out = res + factor * the last map's output (Granite)."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def slots(self, b: int, t: int, c: int) -> tuple[Slot, ...]:
        """branch (B,T,C), the map's output."""
        return (Slot("branch", (b, t, c), ("block",)),)

    def forward(self, ops: Ops, a: Slots, w: Parameters, site: Site, x: Ref) -> None:
        """a.out <- x, a.res."""
        site.forward(ops, a, a.branch, x, getattr(w, site.key))
        ops.scale(a.out, a.branch, a.res, factor=self.factor)

    def backward(
        self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters, site: Site, d_x: Ref, x: Ref
    ) -> None:
        """d_x, dw <- d.out, x."""
        ops.scale(d.branch, d.out, None, factor=self.factor)
        site.backward(ops, a, d, d_x, getattr(dw, site.key), d.branch, x, getattr(w, site.key))


class PostNorm(Added):
    """out = res + rmsnorm(the last map's output) (Gemma 2, OLMo 2)."""

    def __init__(self, norm: RmsNorm) -> None:
        self.norm = norm

    def rows(self, at: SublayerRows, size: int, file: str) -> Iterator[Row]:
        """The norm's weight (C,)."""
        yield at.vector("post_norm", size, file)

    def slots(self, b: int, t: int, c: int) -> tuple[Slot, ...]:
        """branch (B,T,C), the map's output, and post_rstd (B,T)."""
        return Slot("branch", (b, t, c), ("block",)), Slot("post_rstd", (b, t), ("block",), "stat")

    def forward(self, ops: Ops, a: Slots, w: Parameters, site: Site, x: Ref) -> None:
        """a.out <- x, a.res."""
        site.forward(ops, a, a.branch, x, getattr(w, site.key))
        ops.post_norm_forward(a.out, a.post_rstd, a.branch, w.post_norm, a.res, **self.norm.numbers)

    def backward(
        self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters, site: Site, d_x: Ref, x: Ref
    ) -> None:
        """d_x, dw <- d.out, x."""
        read = (d.out, None, a.branch, w.post_norm, a.post_rstd)
        ops.rmsnorm_backward(d.branch, dw.post_norm, *read, **self.norm.of_weight)
        site.backward(ops, a, d, d_x, getattr(dw, site.key), d.branch, x, getattr(w, site.key))


class ScaledEmbed(Embed):
    """factor * what `base` makes of the tokens (Gemma, Granite)."""

    def __init__(self, base: Embed, hidden_size: int, factor: float) -> None:
        self.base, self.hidden_size, self.factor = base, hidden_size, factor

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """plain (B,T,C), beside the slots of the base."""
        return (*self.base.slots(b, t), Slot("plain", (b, t, self.hidden_size)))

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.out (B,T,C) <- a.batch.tokens (B,T)."""
        self.base.forward(ops, a.renamed({"out": "plain"}), w)
        ops.scale(a.out, a.plain, None, factor=self.factor)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """dw <- d.out (B,T,C)."""
        ops.scale(d.plain, d.out, None, factor=self.factor)
        self.base.backward(ops, a, d.renamed({"out": "plain"}), w, dw)


class PlacedEmbed(Embed):
    """What `base` makes of the tokens + positions[how far each is from the start of its document] (GPT-2)."""

    def __init__(self, base: Embed, hidden_size: int) -> None:
        self.base, self.hidden_size = base, hidden_size

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """unplaced and places (B,T,C), beside the slots of the base."""
        own = (Slot(name, (b, t, self.hidden_size)) for name in ("unplaced", "places"))
        return (*self.base.slots(b, t), *own)

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.out (B,T,C) <- a.batch.tokens (B,T), a.batch.positions (B,T)."""
        self.base.forward(ops, a.renamed({"out": "unplaced"}), w)
        ops.embedding_forward(a.places, a.batch.positions, w.positions)
        ops.scale(a.out, a.unplaced, a.places, factor=1.0)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """dw <- d.out (B,T,C)."""
        ops.embedding_backward(dw.positions, d.out, a.batch.positions)
        self.base.backward(ops, a, d, w, dw)
