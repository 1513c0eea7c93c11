"""Held-out loss: the evaluation program over batches of held-out windows."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from llmq.comm.world import World
from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine
from llmq.screen import counted
from llmq.tensor import IGNORED
from llmq.training.progress import Progress
from llmq.training.ready import Ready
from llmq.training.records import EvalRecord


def evaluate(
    run: Ready, engine: Engine, now: Progress, stopped: Callable[[], bool], *, is_last: bool
) -> tuple[Progress, EvalRecord] | None:
    """The progress after an evaluation on held-out data, of which --final-eval may take more, and its record; None once
    `stopped`.

    Ranks take batches in turn; all of them run as often, as each run may gather weights. What they find is added up in
    the order of the batches.
    """
    world, data, start = run.ranks.world, run.data, time.perf_counter()
    sums, tokens = list[tuple[float, int]](), 0
    count, batches = data.held_out(run.log.eval_steps(last=is_last))
    with run.log.task("Evaluating") as report:
        for batch in counted(_in_turn(batches, world), -(-count // world.size), report):
            if stopped():
                return None
            sums.append(engine.evaluate(batch))
            tokens += batch.num_tokens
    found = world.gather(sums)
    total, trained = _added([part[place] for place in range(len(sums)) for part in found][:count])
    record = EvalRecord(
        step=now.step,
        epoch=data.epoch(now.position, now.stream),
        loss=total / max(trained, 1),
        train_loss=now.mean_loss,
        time_ms=1e3 * (time.perf_counter() - start),
        tokens=tokens * world.size,
        trained_tokens=trained,
    )
    return now.after_evaluation(record.loss), record


def mean_loss(engine: Engine, batch: Batch, world: World) -> float | None:
    """Loss per trained token of the batch that each rank gives; None without trained tokens."""
    loss, count = _added(world.gather(engine.evaluate(batch)))
    return loss / count if count else None


def _added(sums: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """The sums of losses and tokens of all batches, in order."""
    return sum(loss for loss, _ in sums), sum(count for _, count in sums)


def _in_turn(batches: Iterable[Batch], world: World) -> Iterator[Batch]:
    """This rank's batch of every `world.size`; where the last ones are too few, one without targets."""
    remaining = iter(batches)
    while turn := list(islice(remaining, world.size)):
        if world.rank < len(turn):
            yield turn[world.rank]
        else:
            yield replace(turn[0], targets=np.full_like(turn[0].targets, IGNORED))
