"""Held-out loss: the evaluation program over batches of held-out windows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from llmq.comm.world import ALONE, World
from llmq.data.batches.batch import Batch
from llmq.data.batches.loader import eval_batches
from llmq.data.batches.windows import Samples
from llmq.engine.engine import Engine
from llmq.screen import StartTask, counted
from llmq.tensor import IGNORED


class Evaluated(NamedTuple):
    """The sum of losses of the trained tokens, their number, and that of all tokens."""

    loss: float
    trained: int
    tokens: int


def held_out(
    engine: Engine,
    windows: Samples,
    steps: int | None,
    start_task: StartTask,
    stopped: Callable[[], bool],
    world: World = ALONE,
) -> Evaluated | None:
    """The sums over the first `steps` batches (None: all), or None once `stopped`.

    Ranks take batches in turn; all of them run as often, as each run may gather weights. What they find is added up in
    the order of the batches.
    """
    spec, losses, trained, tokens = engine.plan.spec, [], 0, 0
    whole = -(-windows.num_windows // spec.batch_size)
    count = min(steps or whole, whole)
    batches = eval_batches(windows, spec.batch_size, spec.seq_len, steps)
    with start_task("Evaluating") as report:
        for batch in counted(_in_turn(batches, world), -(-count // world.size), report):
            if stopped():
                return None
            loss, num_trained = engine.evaluate(batch)
            losses.append(loss)
            trained, tokens = trained + num_trained, tokens + batch.num_tokens
    found = world.gather([losses, trained])
    in_order = [part[0][place] for place in range(len(losses)) for part in found]
    return Evaluated(sum(in_order[:count]), sum(part[1] for part in found), tokens * world.size)


def _in_turn(batches: Iterable[Batch], world: World) -> Iterator[Batch]:
    """This rank's batch of each so many that there are ranks; where the last ones are too few, one without targets."""
    remaining = iter(batches)
    while turn := list(islice(remaining, world.size)):
        if world.rank < len(turn):
            yield turn[world.rank]
        else:
            yield replace(turn[0], targets=np.full_like(turn[0].targets, IGNORED))
