"""The way of a micro-batch through a model: embed, blocks, head, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmq.ops.record import Replay


@dataclass(frozen=True)
class Block:
    """One decoder layer: two sublayers on the residual stream."""

    attention: Any
    mlp: Any

    def forward(self, ops: Any, a: Any, w: Any) -> None:
        """The next layer's a.attention.res <- a.attention.res."""
        self.attention.forward(ops, a.attention, w.attention)
        self.mlp.forward(ops, a.mlp, w.mlp)

    def backward(self, ops: Any, a: Any, d: Any, w: Any, dw: Any) -> None:
        """d.attention.res, dw <- the next layer's d.attention.res."""
        self.mlp.backward(ops, a.mlp, d.mlp, w.mlp, dw.mlp)
        self.attention.backward(ops, a.attention, d.attention, w.attention, dw.attention)


@dataclass(frozen=True)
class Model:
    """A decoder. Frames `a` and `d` are indexed by layer; `weights` and `grads` are stores."""

    embed: Any
    blocks: tuple[Block, ...]
    head: Any

    def forward(self, ops: Any, a: Any, weights: Any) -> None:
        """a.head.res <- tokens."""
        self.embed.forward(ops, a.embed, weights.bundle("embed"))
        for layer, w in weights.walk(ops, range(len(self.blocks)), "forward"):
            self.blocks[layer].forward(ops, a[layer], w)

    def backward(self, ops: Any, a: Any, d: Any, weights: Any, grads: Any) -> None:
        """All gradients <- d.head.res; each layer's dropped intermediates are computed again just before their use."""
        layers = range(len(self.blocks) - 1, -1, -1)
        for (layer, w), dw in zip(weights.walk(ops, layers, "backward"), grads.walk(ops, layers), strict=True):
            self.blocks[layer].forward(Replay(ops), a[layer], w)
            self.blocks[layer].backward(ops, a[layer], d[layer], w, dw)
        self.embed.backward(ops, a.embed, d.embed, weights.bundle("embed"), grads.bundle("embed"))
