"""What a run begins with: what ranks take over from the first, and the weights of its source or a checkpoint's state.

For a large model both take minutes. A run that is asked to end meanwhile raises Stopped and leaves the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from llmq.data.stream import Stopped
from llmq.disk import shown
from llmq.engine.bound_plan import make_ready
from llmq.engine.engine import Engine
from llmq.files.checkpoint import Checkpoints
from llmq.files.huggingface import export_folder, finish_export
from llmq.files.manifest import Reader
from llmq.files.run_lock import held, kept_folder, replaced_whole
from llmq.files.tensor_files import ByteCount
from llmq.options.parse import Options
from llmq.row import Row
from llmq.screen import counted
from llmq.training.interrupt import Interrupt
from llmq.training.job import Job, is_dry
from llmq.training.log import RunLog
from llmq.training.ranks import Ranks


def told(job: Job) -> dict[str, Any]:
    """What the other ranks take over from the first one's job."""
    dtypes = job.plan.spec.precision
    resume = str(job.resume) if job.resume else None
    sites = {"matmul": dtypes.matmul, "wide": list(dtypes.wide)}
    fit = {"fit": dict(job.fitted)} if job.fitted else {}
    return {"resume": resume, "sites": sites, "ranks": dict(job.found.ranks), **fit}


def share_algorithms(job: Job, log: RunLog, ranks: Ranks) -> None:
    """Times the matrix products of the plan on the first rank; the others compute as it does, and so with its bits."""
    with ranks.long("timing matrix products"), log.task("Timing matrix products") as report:
        if ranks.is_first:
            make_ready(job.plan, job.backend, report)
        chosen = ranks.agreed(dict(job.backend.algorithms))
        if not ranks.is_first:
            job.backend.take(chosen)


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


@contextmanager
def hold(options: Options, log: RunLog, ranks: Ranks) -> Iterator[None]:
    """Holds the lock on all that the run writes; a dry run writes nothing, and of many ranks the first holds it.

    StorageError if another run has it.
    """
    with ExitStack() as stack:
        log.console_is_all = is_dry(options.run)
        if ranks.is_first and not is_dry(options.run):
            stack.enter_context(held(replaced_whole("--out-dir", export_folder(options.export)), log.say))
            finish_export(options.export)  # may bring back the checkpoints, which can be below the model
            saved = Checkpoints(options.checkpoint).folder
            stack.enter_context(held(kept_folder("--checkpoint-dir", saved), log.say))
            stack.enter_context(held(replaced_whole("--log-file", log.path), log.say))
        yield
