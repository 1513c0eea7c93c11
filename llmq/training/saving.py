"""The state of a run on the disk: what a run begins with, when it is saved, and what a checkpoint says of the run.

How the run that continues a checkpoint differs is found out from that. To load a large model, or a checkpoint, takes
minutes: a run that is asked to end meanwhile raises Stopped and leaves the rest.
"""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmq.data.batches.loader import Data
from llmq.data.stream import Stopped
from llmq.data.tokens.cache import key_of
from llmq.disk import shown
from llmq.engine.engine import Engine
from llmq.errors import NonFiniteError, RefusedStepError, StorageError
from llmq.files.checkpoint import check_same
from llmq.files.manifest import Reader
from llmq.files.tensor_files import ByteCount
from llmq.files.writers import Keep, Saver, Snapshot
from llmq.hardware import device
from llmq.options.field import flag
from llmq.options.parse import changed, plugins_of
from llmq.plan.plan import Plan
from llmq.redact import redacted_in
from llmq.row import Row
from llmq.screen import counted
from llmq.training.hooks import Hook, RunView
from llmq.training.interrupt import Interrupt
from llmq.training.progress import Progress
from llmq.training.ready import Ready, checkpoint_bytes_of, checkpoint_slices

CHANGING = ("optimizer", "method", "loss")  # plug-ins that make a run another one
HOST_RESERVE = 0.05  # of the host's memory stays free when checkpoints are copied into it


class RunCheckpoints:
    """Begins checkpoints, which `saver` may write while training continues, and tells `hooks` of those that are
    complete."""

    def __init__(self, ready: Ready, saver: Saver, hooks: Sequence[Hook]) -> None:
        self._ready, self._saver, self._hooks = ready, saver, hooks
        self._checkpoints = ready.earlier.checkpoints
        self.path, self.step = ready.earlier.path, ready.earlier.step  # of the newest checkpoint that is complete
        self._begun = self.step  # step of the newest save that was begun

    def is_asked(self) -> bool:
        """Whether the file that asks for a checkpoint is there, which the first of many ranks looks for."""
        return self._ready.ranks.is_first and self._checkpoints.asked()

    def is_due(self, now: Progress, *, last: bool) -> bool:
        """Whether to save after this step: each n-th one, the last, and one that was evaluated as the best."""
        is_best = self._checkpoints.improves(now.metrics)
        return self._checkpoints.due(now.step, last=last) or is_best

    def save(self, run: RunView, *, beside: bool = False) -> None:
        """Begins a checkpoint of this step, unless it is there or under way.

        With `beside`, or if the step was refused, all older ones stay.
        """
        now, plan = run.progress, run.engine.plan
        if now.step in (self.step, self._begun):
            return
        self.settle(run)
        own = {hook.key: hook.state() for hook in self._hooks if hook.key}
        state = {**now.stored, **own, **state_of(self._ready, plan)}
        beside = beside or now.rejected > 0  # theirs may be the last sound weights
        snapshot = Snapshot(now.step, checkpoint_slices(plan), run.engine.state, state, self._metrics(run))
        self._saver.save(snapshot, Keep() if beside else self._checkpoints.keep)
        self._begun = now.step
        self.settle(run, wait=False)

    def _metrics(self, run: RunView) -> dict[str, float]:
        """What the evaluation of this step has found, with what a callback logged of it that --save-best goes by."""
        name, now, history = self._checkpoints.keep.best or "", run.progress, run.history
        if name not in history or history.steps(name)[-1] != now.step or not math.isfinite(history[name][-1]):
            return now.metrics
        return {**now.metrics, name: float(history[name][-1])}

    def settle(self, run: RunView, *, wait: bool = True) -> None:
        """Notes a save that is complete, having waited for it or not. StorageError for one that failed."""
        begun, self._begun = self._begun, self.step  # one that failed is begun again if it is due
        with self._ready.ranks.long("saving") if wait else nullcontext():
            path = self._saver.finished(wait=wait)
        self._begun = begun
        if path is not None:
            self.path, self.step = path, begun
            for hook in self._hooks:
                hook.on_save(run, path, begun)

    def go_back(self, path: Path | None, step: int) -> None:
        """The run is that of a checkpoint again: later steps are saved again."""
        self.path, self.step, self._begun = path, step, step

    def rescue(self, run: RunView, error: Exception, *, is_updating: bool) -> None:
        """Saves the finished steps before an error ends the run; no older checkpoint goes for that."""
        is_of_all = isinstance(error, RefusedStepError)
        if isinstance(error, NonFiniteError) and not is_of_all:  # its weights are not worth resuming from
            with suppress(StorageError):
                self.settle(run)
            return
        try:
            self.settle(run)
            if is_updating or (self._ready.ranks.size > 1 and not is_of_all):
                why = "within an update" if is_updating else "on one rank, and all save together"
                raise RuntimeError(f"the error came {why}")
            self.save(run, beside=True)
            self.settle(run)
        except Exception as why:  # the one that ends the run is raised; this one is said
            if (lost := run.progress.step - self.step) > 0:
                self._ready.log.say(f"The {lost} steps since the last checkpoint are lost: {why}")


def saver_of(run: Ready) -> Saver:
    """What writes the run's checkpoints: while training continues, or having said so where the host has too little
    memory for a copy."""
    homes = ("host", "device") if run.device.kind == "cpu" else ("host",)  # what of the plan is in host memory
    needed = checkpoint_bytes_of(run.plan) + sum(sum(run.plan.table(home).values()) for home in homes)
    total, free = device.memory_bytes()
    fits, log = needed + HOST_RESERVE * total <= free, run.log
    if not fits:
        log.say(
            f"Training waits while a checkpoint is written: to save beside it, the run needs {shown(needed)} of host "
            f"memory beyond {shown(int(HOST_RESERVE * total))} that stay free, and {shown(free)} are free"
        )
    allocate = run.backend.host_bytes if fits else None
    return Saver(run.earlier.checkpoints.folder, log.say, allocate, partial(log.task, words=shown), run.ranks.world)


def state_of(run: Ready, plan: Plan) -> dict[str, Any]:
    """What a checkpoint keeps of a run under a plan, for the one that continues it."""
    dtypes, data = plan.spec.precision, run.data
    return {
        "options": dict(run.options),
        "ran_as": {"ranks": data.world, "rows": data.samples_per_step},
        "must_match": must_match(run, plan),
        "row_layout": data.layout.kind,
        "algorithms": run.backend.algorithms,
        "sites": {"matmul": dtypes.matmul, "wide": list(dtypes.wide)},
        "added_tokens": list(run.source.new_tokens),
    }


def must_match(run: Ready, plan: Plan) -> dict[str, Any]:
    """What a checkpoint has in common with the run that continues it: else it would be another run."""
    spec, new = plan.spec, run.source.new_tokens
    return {
        "seed": spec.seed,
        **run.data.identity(),
        "model": spec.config.identity(),
        "parameters": {row.name: list(row.shape) for row in plan.rows},
        **({"frozen model": run.base} if plan.loaded_anew else {}),
        **({"added tokens": f"{len(new)} from {new[0]['content']!r} on, {key_of(new)}"} if new else {}),
        **spec.adapters.must_match(),
        **spec.hyper.rule.identity(),
        **spec.precision.identity(),
        **{flag(key): name for key, kind, name in plugins_of(run.options) if kind in CHANGING},
    }


def changes(saved: Mapping[str, Any], options: Mapping[str, Any], data: Data) -> list[str]:
    """How the run that continues a checkpoint differs: options, ranks and rows per step."""
    found = changed(saved["options"], redacted_in(options))
    sizes = {"ranks": data.world, "rows": data.samples_per_step}
    before = sizes | saved.get("ran_as", {})  # earlier releases do not say it
    names = {"ranks": "ranks", "rows": "rows per step"}
    return found + [f"{name} {before[key]} to {sizes[key]}" for key, name in names.items() if before[key] != sizes[key]]


def begin(run: Ready, engine: Engine, hooks: Sequence[Hook], interrupt: Interrupt) -> None:
    """Loads into the engine and the hooks what the run begins with, and opens the log's file.

    UsageError naming what must match the checkpoint and does not.
    """
    earlier, log, num_steps = run.earlier, run.log, run.schedule.steps
    if earlier.reader is None:
        load_weights(run, engine, interrupt)
        log.begin(num_steps=num_steps)
        return
    saved, now = earlier.state["must_match"], redacted_in(must_match(run, run.plan))
    if "data" in earlier.checkpoints.resets:  # which may then be other data
        now = {name: value for name, value in now.items() if name not in run.data.identity()}
        saved = {name: value for name, value in saved.items() if name in now}
    check_same(saved, now)
    for hook in hooks:
        if hook.key in earlier.state:
            hook.resume(earlier.state[hook.key])
    restore(run, engine, interrupt, earlier.reader, resets=earlier.checkpoints.resets)
    log.begin(resume_step=earlier.step, num_steps=num_steps)
    log.notice(f"Continued from {earlier.path}")
    if differs := changes(earlier.state, run.options, run.data):
        log.notice(f"Changed since then: {', '.join(differs)}")


def load_weights(run: Ready, engine: Engine, interrupt: Interrupt) -> None:
    """The weights that a run begins with. Stopped."""
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


def restore(run: Ready, engine: Engine, interrupt: Interrupt, reader: Reader, *, resets: Collection[str] = ()) -> None:
    """The state of a checkpoint; moments are zero if the optimizer begins again. Stopped."""
    plan = engine.plan
    moments = plan.moment_names if "optimizer" in resets else ()
    one_memory = reader.in_one_memory()
    with run.log.task(f"Reading {reader.path}", words=shown) as report:
        work = ByteCount(checkpoint_bytes_of(plan), report)

        def read(name: str, *box: tuple[int, ...]) -> np.ndarray:
            if interrupt:
                raise Stopped
            value = one_memory(name, *box)
            work.moved(value.nbytes)
            return np.zeros_like(value) if name in moments else value

        engine.restore(read, run.frozen(plan))
