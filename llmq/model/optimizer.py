"""The update at the end of a step: global norm, scales, the optimizer's rule, and the weights' copies for the next one.

Gradients are sums over the tokens of the step; one device number, clip factor over token count, is read by the
rule's op beside a flag `apply`, so that a non-finite step is a no-op without the host being asked.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
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
    rule = RULES[options.optimizer](options.model_dump())
    return Hyperparameters(rule, options.grad_clip, options.grad_clip > 0 and options.clip_by == "last")


def stream(row: Row) -> int:
    """The number that addresses a parameter's random bits: a hash of its address, so that order does not matter."""
    return zlib.crc32(row.address.encode())


@dataclass(frozen=True)
class RowGroup:
    """Rows that are updated by one norm and one rate: all (None), or those of one of several adapters, by their names.

    `cells` are the numbers of the update, `ranks` what agrees on them, and `seed` that of stochastic rounding.
    """

    cells: Mapping[str, Ref]
    hyper: Hyperparameters
    seed: int
    ranks: Any
    rows: frozenset[str] | None = None


def update(
    ops: Any,
    weights: Any,
    grads: Any,
    moments: Any,
    ranks: Any,
    cells: Mapping[str, Ref],
    groups: Sequence[RowGroup],
    always: Ref,
    tracked: Any,
) -> None:
    """Every master and state, and all copies of the weights <- gradients, group by group.

    Scales change first: a weight copy written here and its scale stay together until the next update. Those that
    several groups share do so whether or not a group's step is applied: one that saw a number that is not finite stays.
    """
    agreed = [_agreed(ops, grads, group) for group in groups]
    common = ranks.agree_on_largest(ops, cells)
    for group, own in zip(groups, agreed, strict=True):
        hyper, of = group.hyper, group.cells
        if hyper.clips_by_last:
            ops.last_norm_scale(of["last_norm"], of["grad_scale"], None, *_before(of, own), grad_clip=hyper.grad_clip)
        _measure(ops, of, own, hyper, None if hyper.clips_by_last else of["grad_scale"])
    _update_scales(ops, cells, common, groups[0].cells["apply"] if len(groups) == 1 else always)
    for group in groups:
        walks = zip(
            moments.walk(ops, only=group.rows),
            weights.written(ops, group.rows),
            grads.sums(ops, group.rows),
            strict=True,
        )
        of = {**cells, **group.cells}
        _step(ops, ((*one, of["apply"]) for one in walks), of, group.hyper, group.seed, tracked)


def _agreed(ops: Any, grads: Any, group: RowGroup) -> Mapping[str, Ref]:
    """A group's sums of squares, loss and tokens of all ranks <- its gradients and cells."""
    first = 0
    for grad in grads.shares(ops, group.rows):
        count = num_norm_tiles(grad.shape)
        ops.sum_squares(group.cells["partials"].flat(first, count), grad)
        first += count
    agreed: Mapping[str, Ref] = group.ranks.agree(ops, group.cells)
    return agreed


def begin_fused(ops: Any, cells: Mapping[str, Ref], hyper: Hyperparameters) -> None:
    """What the update of each part of the model reads, as soon as the loss is known: a scale by no norm but
    the last step's."""
    written = (cells["last_norm"], cells["grad_scale"], cells["apply"])
    ops.last_norm_scale(*written, *_before(cells, cells), grad_clip=hyper.grad_clip)


def update_fused(
    ops: Any,
    weights: Any,
    moments: Any,
    grads: Mapping[str, tuple[Ref, int]],
    cells: Mapping[str, Ref],
    hyper: Hyperparameters,
    seed: int,
    tracked: Any,
    *,
    applies: bool,
) -> None:
    """The states and weights of some rows <- `grads`, by row name, each with the place of its first partial sum.

    A row whose gradient is not finite is left alone. Without `applies` gradients are summed for the norm alone.
    """
    applied, found = [], []
    for whole, start in grads.values():
        first = start
        for grad in whole.entries:
            partials = cells["partials"].flat(first, count := num_norm_tiles(grad.shape))
            first += count
            ops.sum_squares(partials, grad)
            apply = Ref(f"apply/{grad.name}", "activation", (1,), cells["apply"].dtype, grad.layer)
            if applies:
                ops.apply_if_finite(apply, partials, cells["apply"])
            found.append(grad)
            applied.append(apply)
    if applies:
        walks = moments.walk(ops, only=grads), weights.written(ops, grads), found, applied
        _step(ops, zip(*walks, strict=True), cells, hyper, seed, tracked)


def end_fused(ops: Any, cells: Mapping[str, Ref], hyper: Hyperparameters) -> None:
    """The norm of a step whose updates are done; `apply` is 0 if it was not finite."""
    _measure(ops, cells, cells, hyper, None)


def _before(cells: Mapping[str, Ref], agreed: Mapping[str, Ref]) -> tuple[Ref, ...]:
    """What a scale by the last step's norm is made of: that norm, the last finite one, loss and tokens."""
    return cells["norm"], cells["last_norm"], agreed["loss"], agreed["tokens"]


def _measure(
    ops: Any, cells: Mapping[str, Ref], agreed: Mapping[str, Ref], hyper: Hyperparameters, scale: Ref | None
) -> None:
    """The norm of the step, whether it is finite, and the scale by it where that is wanted, <- partial sums."""
    written = (cells["norm"], scale, cells["apply"])
    partials = agreed["partials"].flat(0, agreed["partials"].shape[0])
    ops.grad_scale(*written, partials, agreed["loss"], agreed["tokens"], grad_clip=hyper.grad_clip)


def _step(
    ops: Any,
    walks: Iterable[tuple[Any, Ref | None, Ref, Ref]],
    cells: Mapping[str, Ref],
    hyper: Hyperparameters,
    seed: int,
    tracked: Any,
) -> None:
    """The rule on rows with pieces of their states, their weights, their gradients, and whether they are updated; and
    then what a method keeps beside that."""
    for (row, pieces), weight, grad, apply in walks:
        step = (cells["grad_scale"], apply, cells["learning_rate"], cells["step"])
        about = {"weight_decay": hyper.rule.weight_decay if row.decay else 0.0, "rate": row.rate}
        for piece in pieces:
            own = piece.grad or piece.of(grad)
            address = {"seed": seed, "stream": stream(row), "first": piece.first}
            hyper.rule.update(ops, piece.state, piece.of(weight), own, step, **about, **address)
            tracked.update(ops, row, piece, own, cells["grad_scale"], apply)


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
            ops.cast(piece.of(weight), piece.state[MASTER])
    for weight in weights.frozen():
        ops.cast(weight, weight)
