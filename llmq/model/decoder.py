"""The way of a micro-batch through a model: embed, blocks, head, and back."""

from collections.abc import Callable
from dataclasses import dataclass

from llmq.blocks.embed import Embed
from llmq.blocks.head import Head
from llmq.ops.record import Backward, Replay
from llmq.protocols import GradStore, Ops, Parameters, PartName, PiecedSublayer, Site, Slots, Sublayer, WeightStore


@dataclass(frozen=True)
class Block:
    """One decoder layer: two sublayers on the residual stream."""

    attention: Sublayer
    mlp: PiecedSublayer

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """The next layer's a.attention.res <- a.attention.res."""
        self.attention.forward(ops, a.attention, w.attention)
        for piece in self.mlp.pieces(a.mlp):
            self.mlp.forward(ops, piece, w.mlp)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """d.attention.res, dw <- the next layer's d.attention.res. What was dropped is made again just before: of the
        MLP a piece at a time."""
        self.attention.forward(Replay(ops), a.attention, w.attention)
        for at, d_at in zip(self.mlp.pieces(a.mlp), self.mlp.pieces(d.mlp), strict=True):
            self.mlp.forward(Replay(ops), at, w.mlp)
            self.mlp.backward(ops, at, d_at, w.mlp, dw.mlp)
        self.attention.backward(ops, a.attention, d.attention, w.attention, dw.attention)


@dataclass(frozen=True)
class Model:
    """A decoder. Its parts are `embed`, the blocks by their numbers from 0, and `head`; so are the frames `a` and `d`
    and what the stores `weights` and `grads` yield, part by part, in the order in which they are walked."""

    embed: Embed
    blocks: tuple[Block, ...]
    head: Head

    @property
    def sites(self) -> dict[str, Site]:
        """Every linear map by its name, in the order of the forward pass."""
        sublayers = [sublayer for block in self.blocks for sublayer in (block.attention, block.mlp)]
        return {site.name: site for site in (*(s for sublayer in sublayers for s in sublayer.sites), self.head.site)}

    @property
    def below_head(self) -> dict[PartName, Embed | Block]:
        """Every part but the head by its name, in the order of the forward pass."""
        return {"embed": self.embed, **dict(enumerate(self.blocks))}

    def train(self, ops: Ops, a: Slots, d: Slots, weights: WeightStore, grads: GradStore) -> None:
        """All gradients, and the sums of loss and tokens, <- a.batch. The head makes its gradient with the loss."""
        below, back = self.below_head, Backward(ops)
        self.read(ops, a, weights)
        parts = {"head": self.head, **dict(reversed(below.items()))}
        walks = (weights.walk(back, tuple(parts), "backward"), grads.walk(back, tuple(parts)))
        for (name, w), dw in zip(*walks, strict=True):
            parts[name].backward(back, a[name], d[name], w, dw)

    def infer(self, ops: Ops, a: Slots, d: Slots, weights: WeightStore) -> None:
        """What the reader of the logits leaves, such as the sums of loss and tokens, <- a.batch. No gradient is read,
        though that of the logits has a name in `d`."""
        parts: dict[PartName, Callable[..., None]] = {name: part.forward for name, part in self.below_head.items()}
        parts["head"] = lambda ops, a, w: self.head.forward(ops, a, d["head"], w)
        for name, w in weights.walk(ops, tuple(parts), "forward"):
            parts[name](ops, a[name], w)

    def read(self, ops: Ops, a: Slots, weights: WeightStore) -> None:
        """What the blocks leave outside their slots, such as a cache, <- a.batch."""
        below = self.below_head
        for name, w in weights.walk(ops, tuple(below), "forward"):
            below[name].forward(ops, a[name], w)
