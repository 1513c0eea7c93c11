"""What a run begins with: the weights of its source, or the state of the checkpoint that it continues.

For a large model both take minutes. A run that is asked to end meanwhile raises Stopped and leaves the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from llmq.data.stream import Stopped
from llmq.disk import shown
from llmq.engine.engine import Engine
from llmq.files.manifest import Reader
from llmq.files.tensor_files import ByteCount
from llmq.row import Row
from llmq.screen import counted
from llmq.training.hooks import Hook
from llmq.training.interrupt import Interrupt
from llmq.training.ready import Ready, checkpoint_bytes_of
from llmq.training.saving import changes, check_continues


def begin(run: Ready, engine: Engine, hooks: Sequence[Hook], interrupt: Interrupt) -> None:
    """Loads into the engine and the hooks what the run begins with, and opens the log's file."""
    earlier, log, num_steps = run.earlier, run.log, run.schedule.steps
    if earlier.reader is None:
        _load_weights(run, engine, interrupt)
        log.begin(num_steps=num_steps)
        return
    check_continues(run, earlier.state["must_match"])
    for hook in hooks:
        if hook.key in earlier.state:
            hook.resume(earlier.state[hook.key])
    _restore(run, engine, interrupt, earlier.reader)
    log.begin(resume_step=earlier.step, num_steps=num_steps)
    log.notice(f"Continued from {earlier.path}")
    if differs := changes(earlier.state, run.options, run.data):
        log.notice(f"Changed since then: {', '.join(differs)}")


def _load_weights(run: Ready, engine: Engine, interrupt: Interrupt) -> None:
    rows, start = run.plan.rows, time.perf_counter()
    title = f"{'Drawing weights of' if run.source.from_scratch else 'Loading model from'} {run.source.place}"

    def values() -> Iterator[tuple[Row, np.ndarray]]:
        for value in run.values(rows):
            if interrupt:
                raise Stopped
            yield value

    with run.log.task(title) as report:
        engine.load(counted(values(), len(rows), report))
    run.log.say(f"{title} ... done, {time.perf_counter() - start:.1f} s")


def _restore(run: Ready, engine: Engine, interrupt: Interrupt, reader: Reader) -> None:
    """The state of a checkpoint; moments are zero if the optimizer begins again."""
    moments = run.plan.moment_names if "optimizer" in run.earlier.checkpoints.resets else ()
    one_memory = reader.in_one_memory()
    with run.log.task(f"Reading {reader.path}", words=shown) as report:
        work = ByteCount(checkpoint_bytes_of(run.plan), report)

        def read(name: str, *box: tuple[int, ...]) -> np.ndarray:
            if interrupt:
                raise Stopped
            value = one_memory(name, *box)
            work.moved(value.nbytes)
            return np.zeros_like(value) if name in moments else value

        engine.restore(read, run.frozen(run.plan))
