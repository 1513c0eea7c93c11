"""The update of weights in backward, a part of the model at a time; the norm of the step is known at its end."""

from collections.abc import Mapping
from typing import Any

from llmq.model.optimizer import Updater, before
from llmq.tensor import Ref, num_norm_tiles


def begin(ops: Any, by: Updater) -> None:
    """What the update of each part of the model reads, as soon as the loss is known: a scale by no norm but
    the last step's."""
    written = (by.cells["last_norm"], by.cells["grad_scale"], by.cells["apply"])
    ops.last_norm_scale(*written, *before(by.cells, by.cells), grad_clip=by.hyper.grad_clip)
    by.limit(ops, by.cells)


def update(
    ops: Any, by: Updater, weights: Any, moments: Any, grads: Mapping[str, tuple[Ref, int]], *, applies: bool
) -> None:
    """The states and weights of some rows <- `grads`, by row name, each with the place of its first partial sum.

    A row whose gradient is not finite is left alone. Without `applies` gradients are summed for the norm alone.
    """
    applied, found = [], []
    for grad, first in grads.values():
        partials = by.cells["partials"].flat(first, num_norm_tiles(grad.shape))
        ops.sum_squares(partials, grad)
        apply = Ref(f"apply/{grad.name}", "activation", (1,), by.cells["apply"].dtype, grad.layer)
        if applies:
            ops.apply_if_finite(apply, partials, by.cells["apply"])
        found.append(grad)
        applied.append(apply)
    if applies:
        walks = moments.walk(ops, only=grads), weights.written(ops, grads), found, applied
        by.step(ops, zip(*walks, strict=True))


def end(ops: Any, by: Updater) -> None:
    """The norm of a step whose updates are done; `apply` is 0 if it was not finite."""
    by.measure(ops, by.cells, None)
