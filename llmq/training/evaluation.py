"""Held-out loss: the evaluation program over batches of held-out windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from llmq.comm.world import ALONE, World
from llmq.data.batches.batch import Batch
from llmq.data.batches.loader import Data
from llmq.engine.engine import Engine
from llmq.screen import StartTask, counted
from llmq.tensor import IGNORED


class Evaluated(NamedTuple):
    """The sum of losses of the trained tokens, their number, and that of all tokens; and of several adapters the first
    two of `each`."""

    loss: float
    trained: int
    tokens: int
    each: tuple[tuple[float, int], ...] = ()


def held_out(
    engine: Engine,
    data: Data,
    steps: int | None,
    start_task: StartTask,
    stopped: Callable[[], bool],
    world: World = ALONE,
) -> Evaluated | None:
    """The sums over the first `steps` batches of held-out data (None: all), or None once `stopped`.

    Ranks take batches in turn; all of them run as often, as each run may gather weights. What they find is added up in
    the order of the batches.
    """
    losses, trained, tokens = [], list[list[int]](), 0
    count, batches = data.held_out(steps)
    with start_task("Evaluating") as report:
        for batch in counted(_in_turn(batches, world), -(-count // world.size), report):
            if stopped():
                return None
            sums = [engine.evaluate(batch), *engine.evaluated_each()]
            losses.append([loss for loss, _ in sums])
            trained.append([number for _, number in sums])
            tokens += batch.num_tokens
    found = world.gather([losses, trained])
    in_order = [part[0][place] for place in range(len(losses)) for part in found]
    totals = [sum(column) for column in zip(*in_order[:count], strict=True)]
    counts = [sum(column) for column in zip(*(row for part in found for row in part[1]), strict=True)]
    (total, *each), (number, *numbers) = totals, counts
    return Evaluated(total, number, tokens * world.size, tuple(zip(each, numbers, strict=True)))


def mean_losses(engine: Engine, batch: Batch, world: World) -> list[float | None]:
    """Loss per trained token of the batch that each rank gives, and then that of each of several adapters; None for one
    without trained tokens."""
    found = world.gather([engine.evaluate(batch), *engine.evaluated_each()])
    sums = (
        (sum(losses), sum(counts)) for losses, counts in (zip(*one, strict=True) for one in zip(*found, strict=True))
    )
    return [loss / count if count else None for loss, count in sums]


def _in_turn(batches: Iterable[Batch], world: World) -> Iterator[Batch]:
    """This rank's batch of each so many that there are ranks; where the last ones are too few, one without targets."""
    remaining = iter(batches)
    while turn := list(islice(remaining, world.size)):
        if world.rank < len(turn):
            yield turn[world.rank]
        else:
            yield replace(turn[0], targets=np.full_like(turn[0].targets, IGNORED))
