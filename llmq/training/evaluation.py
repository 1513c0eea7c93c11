"""Held-out loss: the evaluation program over batches of held-out windows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from llmq.comm.world import World
from llmq.data.batches.batch import Batch
from llmq.data.batches.loader import Data
from llmq.engine.engine import Engine
from llmq.screen import StartTask, counted
from llmq.tensor import IGNORED
from llmq.training.progress import Progress
from llmq.training.records import EvalRecord

Sums = dict[str, tuple[float, int]]  # losses and tokens of all, as "", and of each group of rows that has a name


def evaluate(
    engine: Engine,
    data: Data,
    now: Progress,
    steps: int | None,
    start_task: StartTask,
    stopped: Callable[[], bool],
    world: World,
) -> tuple[Progress, EvalRecord] | None:
    """The progress after an evaluation on the first `steps` batches of held-out data (None: all), and its record; None
    once `stopped`.

    Ranks take batches in turn; all of them run as often, as each run may gather weights. What they find is added up in
    the order of the batches.
    """
    start, sums, tokens = time.perf_counter(), list[Sums](), 0
    count, batches = data.held_out(steps)
    with start_task("Evaluating") as report:
        for batch in counted(_in_turn(batches, world), -(-count // world.size), report):
            if stopped():
                return None
            sums.append(_sums(engine, batch))
            tokens += batch.num_tokens
    found = world.gather(sums)
    added = _added([part[place] for place in range(len(sums)) for part in found][:count])
    total, trained = added.pop("")
    held_out = {name: own for name, own in added.items() if own[1]}
    record = EvalRecord(
        step=now.step,
        epoch=data.epoch(now.position, now.stream),
        loss=total / max(trained, 1),
        train_loss=now.mean_loss,
        time_ms=1e3 * (time.perf_counter() - start),
        tokens=tokens * world.size,
        trained_tokens=trained,
        adapters={
            name: {"loss": loss / number, "train_loss": now.group(name).mean_loss, "trained_tokens": number}
            for name, (loss, number) in held_out.items()
        }
        or None,
    )
    losses = {name: loss / number for name, (loss, number) in held_out.items()}
    return now.after_evaluation(record.loss, losses), record


def mean_losses(engine: Engine, batch: Batch, world: World) -> dict[str, float | None]:
    """Loss per trained token of the batch that each rank gives, as "", and that of each group of rows that has a name;
    None for one without trained tokens."""
    added = _added(world.gather(_sums(engine, batch)))
    return {name: loss / count if count else None for name, (loss, count) in added.items()}


def _sums(engine: Engine, batch: Batch) -> Sums:
    """Sum of losses and number of trained tokens of a batch, as "", and of each group of rows."""
    groups = engine.evaluate_groups(batch)
    losses, counts = zip(*groups.values(), strict=True)
    return {**groups, "": (sum(losses), sum(counts))}


def _added(sums: Sequence[Sums]) -> Sums:
    """The sums of all batches, in order."""
    return {name: (sum(one[name][0] for one in sums), sum(one[name][1] for one in sums)) for name in sums[0]}


def _in_turn(batches: Iterable[Batch], world: World) -> Iterator[Batch]:
    """This rank's batch of every `world.size`; where the last ones are too few, one without targets."""
    remaining = iter(batches)
    while turn := list(islice(remaining, world.size)):
        if world.rank < len(turn):
            yield turn[world.rank]
        else:
            yield replace(turn[0], targets=np.full_like(turn[0].targets, IGNORED))
