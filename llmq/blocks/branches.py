"""Other ways onto the residual stream than Llama's."""

from llmq.blocks.embed import Embed
from llmq.blocks.stream import Added
from llmq.protocols import Ops, Parameters, Site, Slots
from llmq.tensor import Ref, Slot


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
