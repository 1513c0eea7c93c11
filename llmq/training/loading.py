"""The weights that a run begins with: its source's, or a checkpoint's with the state of the optimizer.

For a large model both take minutes. A run that is asked to end meanwhile raises Stopped and leaves the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from llmq.data.stream import Stopped
from llmq.disk import shown
from llmq.engine.engine import Engine
from llmq.files.manifest import Reader
from llmq.files.tensor_files import ByteCount
from llmq.row import Row
from llmq.screen import counted
from llmq.training.interrupt import Interrupt
from llmq.training.log import RunLog
from llmq.training.ready import Ready


def load_weights(engine: Engine, run: Ready, log: RunLog, interrupt: Interrupt) -> None:
    """The initial weights into the engine. Stopped if the run is asked to end."""
    rows, start = run.plan.rows, time.perf_counter()
    title = f"{'Drawing weights of' if run.source.from_scratch else 'Loading model from'} {run.source.place}"

    def values() -> Iterator[tuple[Row, np.ndarray]]:
        for value in run.values(rows):
            _stop_if_asked(interrupt)
            yield value

    with log.task(title) as report:
        engine.load(counted(values(), len(rows), report))
    log.say(f"{title} ... done, {time.perf_counter() - start:.1f} s")


def restore(engine: Engine, run: Ready, log: RunLog, interrupt: Interrupt, reader: Reader) -> None:
    """The state of a checkpoint into the engine; moments are zero if the optimizer begins again. Stopped as above."""
    moments = run.plan.moment_names if "optimizer" in run.results.checkpoints.resets else ()
    one_memory = reader.in_one_memory()
    with log.task(f"Reading {reader.path}", words=shown) as report:
        work = ByteCount(run.checkpoint_copy_bytes, report)

        def read(name: str, *box: tuple[int, ...]) -> np.ndarray:
            _stop_if_asked(interrupt)
            value = one_memory(name, *box)
            work.moved(value.nbytes)
            return np.zeros_like(value) if name in moments else value

        engine.restore(read, run.frozen())


def _stop_if_asked(interrupt: Interrupt) -> None:
    """Stopped if the run is asked to end."""
    if interrupt:
        raise Stopped
