"""What a run begins with: the weights of its source, or the state of the checkpoint that it continues.

For a large model both take minutes. A run that is asked to end meanwhile raises Stopped and leaves the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from llmq.data.read_ahead import Stopped
from llmq.disk import shown
from llmq.engine.engine import Engine
from llmq.files.byte_count import ByteCount
from llmq.files.manifest import Reader
from llmq.row import Row
from llmq.screen import counted
from llmq.training.interrupt import Interrupt
from llmq.training.job import Job
from llmq.training.log import RunLog


def load_weights(engine: Engine, job: Job, log: RunLog, interrupt: Interrupt) -> None:
    """The initial weights into the engine. Stopped if the run is asked to end."""
    rows, start = job.plan.rows, time.perf_counter()
    title = f"{'Drawing weights of' if job.source.from_scratch else 'Loading model from'} {job.source.place}"

    def values() -> Iterator[tuple[Row, np.ndarray]]:
        for value in job.parameters(rows):
            _stop_if_asked(interrupt)
            yield value

    with log.task(title) as report:
        engine.load(counted(values(), len(rows), report))
    log.say(f"{title} ... done, {time.perf_counter() - start:.1f} s")


def restore(engine: Engine, job: Job, log: RunLog, interrupt: Interrupt, reader: Reader) -> None:
    """The state of a checkpoint into the engine; moments are zero if the optimizer begins anew. Stopped as above."""
    moments = job.plan.moment_names if "optimizer" in job.checkpoints.resets else ()
    one_memory = reader.in_one_memory()
    with log.task(f"Reading {reader.path}", words=shown) as report:
        work = ByteCount(job.checkpoint_copy_bytes, report)

        def read(name: str, *box: tuple[int, ...]) -> np.ndarray:
            _stop_if_asked(interrupt)
            value = one_memory(name, *box)
            work.moved(value.nbytes)
            return np.zeros_like(value) if name in moments else value

        engine.restore(read, job.frozen())


def _stop_if_asked(interrupt: Interrupt) -> None:
    """Stopped if the run is asked to end."""
    if interrupt:
        raise Stopped
