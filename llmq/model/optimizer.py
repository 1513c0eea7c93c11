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
    cells: Mapping[str, Ref],
    hyper: Hyperparameters,
    seed: int,
) -> None:
    """Every master, m and v, and all copies of the weights <- gradients.

    Scales change first: a weight copy written here and its scale stay together until the next update.
    """
    first = 0
    for grad in grads.sums(ops):
        count = num_norm_tiles(grad.shape)
        ops.sum_squares(cells["partials"].flat(first, count), grad)
        first += count
    sums = (cells["partials"], cells["loss"], cells["tokens"])
    ops.grad_scale(cells["norm"], cells["grad_scale"], cells["apply"], *sums, grad_clip=hyper.grad_clip)
    update_scales(ops, cells, cells["apply"])
    scalars = (cells["grad_scale"], cells["apply"], cells["learning_rate"], cells["step"])
    for (row, state), weight, grad in zip(moments.walk(ops), weights.written(ops), grads.sums(ops), strict=True):
        ops.adamw(
            *state,
            weight,
            *state,
            grad,
            *scalars,
            beta_1=hyper.beta_1,
            beta_2=hyper.beta_2,
            epsilon=hyper.epsilon,
            weight_decay=hyper.weight_decay if row.decay else 0.0,
            seed=seed,
            stream=stream(row),
        )


def update_scales(ops: Any, cells: Mapping[str, Ref], apply: Ref) -> None:
    """New scales <- the amax of the step and its history; nothing is called in a run without delayed scales."""
    state = [cells.get(name) for name in ("scales", "history", "amax")]
    ops.scale_update(*state, *state, cells.get("limits"), apply)


def publish(ops: Any, weights: Any, moments: Any) -> None:
    """All copies of the weights <- masters, as after loading; a frozen weight's from its value."""
    for (_, state), weight in zip(moments.walk(ops, masters_only=True), weights.written(ops), strict=True):
        ops.cast(weight, state.master)
    for weight in weights.frozen():
        ops.cast(weight, weight)
