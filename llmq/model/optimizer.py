"""The update at the end of a step: global norm, scales, the optimizer's rule, and the weights' copies for the next one.

Gradients are sums over the tokens of the step; one device number, clip factor over token count, is read by the
rule's op beside a flag `apply`, so that a non-finite step is a no-op without the host being asked.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmq.optimizers import RULES, adamw
from llmq.optimizers.rule import MASTER, Rule
from llmq.row import Row
from llmq.tensor import Ref, num_norm_tiles

if TYPE_CHECKING:
    from llmq.options.maths import OptimizerOptions


@dataclass(frozen=True)
class Hyperparameters:
    """The optimizer with its constants, and the gradient clip on the norm (0 is no clip), which may be that of the step
    before (clips_by_last)."""

    rule: Rule = adamw.DEFAULT
    grad_clip: float = 1.0
    clips_by_last: bool = False


def resolve(options: OptimizerOptions) -> Hyperparameters:
    """The options as the engine's constants."""
    rule = RULES.call(options.optimizer, options.model_dump())
    return Hyperparameters(rule, options.grad_clip, options.grad_clip > 0 and options.clip_by == "last")


def stream(row: Row) -> int:
    """The number that addresses a parameter's random bits: a hash of its name, so that order does not matter."""
    return zlib.crc32(row.name.encode())


@dataclass(frozen=True)
class Updater:
    """What updates rows: the cells of a step by name, the optimizer, the seed of stochastic rounding, and `trackers`,
    which follow what a method keeps beside states."""

    cells: Mapping[str, Ref]
    hyper: Hyperparameters
    seed: int
    trackers: Sequence[Callable[..., None]]

    def update(self, ops: Any, weights: Any, grads: Any, moments: Any, ranks: Any) -> None:
        """Every master and state, and all copies of the weights <- gradients.

        Scales change first: a weight copy written here and its scale stay together until the next update.
        """
        cells, hyper, first = self.cells, self.hyper, 0
        for grad in grads.shares(ops):
            count = num_norm_tiles(grad.shape)
            ops.sum_squares(cells["partials"].flat(first, count), grad)
            first += count
        agreed = ranks.agree(ops, cells, "partials", "loss", "tokens", "hits", "request", "amax")
        scale = cells["grad_scale"]
        if hyper.clips_by_last:
            ops.last_norm_scale(cells["last_norm"], scale, None, *before(cells, agreed), grad_clip=hyper.grad_clip)
        self.measure(ops, agreed, None if hyper.clips_by_last else scale)
        _update_scales(ops, cells, agreed, cells["apply"])
        walks = zip(moments.walk(ops), weights.written(ops), grads.sums(ops), strict=True)
        self.step(ops, ((*one, cells["apply"]) for one in walks))

    def measure(self, ops: Any, agreed: Mapping[str, Ref], scale: Ref | None) -> None:
        """The norm of the step, whether it is finite, and the scale by it where that is wanted, <- partial sums."""
        written = (self.cells["norm"], scale, self.cells["apply"])
        partials = agreed["partials"].flat(0, agreed["partials"].shape[0])
        ops.grad_scale(*written, partials, agreed["loss"], agreed["tokens"], grad_clip=self.hyper.grad_clip)
        self.limit(ops, agreed)

    def limit(self, ops: Any, agreed: Mapping[str, Ref]) -> None:
        """What else than numbers that are not finite keeps a step from being applied, once that is known: nothing."""

    def step(self, ops: Any, walks: Iterable[tuple[Any, Ref | None, Ref, Ref]]) -> None:
        """The rule on rows with pieces of their states, their weights, their gradients, and whether they are updated;
        and then what a method keeps beside that."""
        cells, rule = self.cells, self.hyper.rule
        for (row, pieces), weight, grad, apply in walks:
            numbers = (cells["grad_scale"], apply, cells["learning_rate"], cells["step"])
            about = {"weight_decay": rule.weight_decay if row.decay else 0.0, "rate": row.rate}
            for piece in pieces:
                own = piece.grad or piece.of(grad)
                address = {"seed": self.seed, "stream": stream(row), "first": piece.first}
                rule.update(ops, piece.state, piece.of(weight), own, numbers, **about, **address)
                for track in self.trackers:
                    track(ops, row, piece, own, cells["grad_scale"], apply)


def before(cells: Mapping[str, Ref], agreed: Mapping[str, Ref]) -> tuple[Ref, ...]:
    """What a scale by the last step's norm is made of: that norm, the last finite one, loss and tokens."""
    return cells["norm"], cells["last_norm"], agreed["loss"], agreed["tokens"]


def calibrate(ops: Any, cells: Mapping[str, Ref], ranks: Any, always: Ref) -> None:
    """New scales <- the amax of a pass that changed no weight."""
    _update_scales(ops, cells, ranks.agree(ops, cells, "amax"), always)


def _update_scales(ops: Any, cells: Mapping[str, Ref], agreed: Mapping[str, Ref], apply: Ref) -> None:
    """New scales <- the amax of the step and its history; nothing is called in a run without delayed scales."""
    state = [cells.get(name) for name in ("scales", "history", "amax")]
    ops.scale_update(*state, *state[:2], agreed.get("amax"), cells.get("limits"), apply)


def publish(ops: Any, weights: Any, moments: Any) -> None:
    """All copies of the weights <- masters, as after loading; a frozen weight's from its value."""
    for (_, pieces), weight in zip(moments.walk(ops, masters_only=True), weights.written(ops), strict=True):
        for piece in pieces:
            ops.cast(piece.of(weight), piece.state[MASTER])
    for weight in weights.frozen():
        ops.cast(weight, weight)
