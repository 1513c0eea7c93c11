"""The update at the end of a step: global norm, scales, AdamW, and the weights' copies for the next step.

Gradients are sums over the tokens of the step; one device number, clip factor over token count, is read by `adamw`
beside a flag `apply`, so that a non-finite step is a no-op without the host being asked.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmq.row import Row
from llmq.tensor import Ref, num_norm_tiles

if TYPE_CHECKING:
    from llmq.options.maths import OptimizerOptions


@dataclass(frozen=True)
class Hyperparameters:
    """AdamW's constants (Loshchilov and Hutter, 2019), the gradient clip on the norm (0 is no clip), and what training
    adds to the loss (z_loss) and to the embedded tokens (neftune_alpha)."""

    beta_1: float = 0.9
    beta_2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    z_loss: float = 0.0
    neftune_alpha: float = 0.0


def resolve(options: OptimizerOptions) -> Hyperparameters:
    """The options as the engine's constants."""
    return Hyperparameters(
        options.beta_1,
        options.beta_2,
        options.adam_epsilon,
        options.weight_decay,
        options.grad_clip,
        options.z_loss,
        options.neftune_alpha,
    )


def stream(row: Row) -> int:
    """The number that addresses a parameter's random bits: a hash of its name, so that order does not matter."""
    return zlib.crc32(row.name.encode())


def update(
    ops: Any,
    weights: Any,
    grads: Any,
    moments: Any,
    ranks: Any,
    cells: Mapping[str, Ref],
    hyper: Hyperparameters,
    seed: int,
) -> None:
    """Every master, m and v, and all copies of the weights <- gradients.

    Scales change first: a weight copy written here and its scale stay together until the next update.
    """
    first = 0
    for grad in grads.shares(ops):
        count = num_norm_tiles(grad.shape)
        ops.sum_squares(cells["partials"].flat(first, count), grad)
        first += count
    agreed = ranks.agree(ops, cells)
    partials = agreed["partials"].flat(0, agreed["partials"].shape[0])
    sums = (partials, agreed["loss"], agreed["tokens"])
    ops.grad_scale(cells["norm"], cells["grad_scale"], cells["apply"], *sums, grad_clip=hyper.grad_clip)
    _update_scales(ops, cells, agreed, cells["apply"])
    scalars = (cells["grad_scale"], cells["apply"], cells["learning_rate"], cells["step"])
    walks = moments.walk(ops), weights.written(ops), grads.sums(ops)
    for (row, pieces), weight, grad in zip(*walks, strict=True):
        for piece in pieces:
            ops.adamw(
                *piece.state,
                piece.of(weight),
                *piece.state,
                piece.grad or piece.of(grad),
                *scalars,
                beta_1=hyper.beta_1,
                beta_2=hyper.beta_2,
                epsilon=hyper.epsilon,
                weight_decay=hyper.weight_decay if row.decay else 0.0,
                seed=seed,
                stream=stream(row),
                first=piece.first,
                rate=row.rate,
            )


def calibrate(ops: Any, cells: Mapping[str, Ref], ranks: Any, always: Ref) -> None:
    """New scales <- the amax of a pass that changed no weight."""
    _update_scales(ops, cells, ranks.agree_on_amax(ops, cells), always)


def _update_scales(ops: Any, cells: Mapping[str, Ref], agreed: Mapping[str, Ref], apply: Ref) -> None:
    """New scales <- the amax of the step and its history; nothing is called in a run without delayed scales."""
    state = [cells.get(name) for name in ("scales", "history", "amax")]
    ops.scale_update(*state, *state[:2], agreed.get("amax"), cells.get("limits"), apply)


def publish(ops: Any, weights: Any, moments: Any) -> None:
    """All copies of the weights <- masters, as after loading; a frozen weight's from its value."""
    for (_, pieces), weight in zip(moments.walk(ops, masters_only=True), weights.written(ops), strict=True):
        for piece in pieces:
            ops.cast(piece.of(weight), piece.state.master)
    for weight in weights.frozen():
        ops.cast(weight, weight)
