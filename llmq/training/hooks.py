"""Hooks of the training loop: what is called at the moments of a run, what it sees then, and what it may ask for.

A hook sees a `RunView`, which is frozen, and asks by what it returns. All ranks have the same hooks, which must ask for
the same on each of them. Here are those that write the log, and a method of adaptation's.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import Flag
from pathlib import Path
from typing import Any

import numpy as np

from llmq.backends import Backend
from llmq.data.batches.batch import Batch
from llmq.disk import MIB
from llmq.engine.engine import Engine, StepResult
from llmq.errors import INTERRUPTED, TERMINATED, UsageError
from llmq.hardware import nvml
from llmq.hardware.device import Device
from llmq.training.log import SUMMARY, RunLog
from llmq.training.progress import Progress
from llmq.training.records import EvalRecord, GpuRecord, History, TrainRecord, TrainResult


class Ask(Flag):
    """What a hook may ask of the loop: to evaluate or to save after this step, that it is the run's last, or, after a
    step, to go back to the last checkpoint."""

    NOTHING = 0
    EVALUATE = 1
    SAVE = 2
    STOP = 4
    ROLLBACK = 8


@dataclass(frozen=True)
class RunView:
    """A run at one moment: how far it is, of how many steps, and the metrics so far."""

    progress: Progress
    num_steps: int
    find_engine: Callable[[], Engine]
    history: History

    @property
    def engine(self) -> Engine:
        """What trains. Hooks keep no reference to it, as another one may get its memory."""
        return self.find_engine()

    @property
    def is_last(self) -> bool:
        """Whether no step follows."""
        return self.progress.step == self.num_steps


class Hook:
    """What is called at the moments of a run. Here it does nothing: a hook is a class with some methods of its own."""

    key = ""  # under which a checkpoint holds its state, if it has any

    def state(self) -> dict[str, Any]:
        """What a run that resumes needs of it, as JSON has it."""
        return {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes the state of a checkpoint."""

    def on_begin(self, run: RunView) -> None:
        """The weights are there, and the log is open."""

    def before_step(self, run: RunView, batch: Batch) -> None:
        """A step is about to begin with this micro-batch."""

    def during_step(self, run: RunView) -> None:
        """The first micro-batch of a step is being computed."""

    def after_update(self, run: RunView, done: StepResult) -> None:
        """The weights were updated, unless `done` says that the step was not applied; `run` is still that before it."""

    def after_step(self, run: RunView, record: TrainRecord) -> Ask | None:
        """A step is done."""

    def on_evaluate(self, run: RunView, record: EvalRecord | None) -> Ask | None:
        """An evaluation is done; without held-out data it has no record."""

    def on_save(self, run: RunView, path: Path, step: int) -> None:
        """The checkpoint of a step is complete, which may be an earlier one than that of `run`."""

    def on_rollback(self, run: RunView) -> None:
        """The run is what it was after an earlier step, that of `run`, and the hooks have resumed from there; the data
        goes on."""

    def on_end(self, run: RunView, result: TrainResult) -> None:
        """The run has ended without an error."""


class MethodHook(Hook):
    """Lets a method of adaptation do what it does around a step."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def before_step(self, run: RunView, batch: Batch) -> None:
        """What is due before the micro-steps."""
        run.engine.plan.tracked.before_step(run.engine, run.progress.step + 1)

    def after_update(self, run: RunView, done: StepResult) -> None:
        """What belongs to the update."""
        if (text := run.engine.plan.tracked.after_update(run.engine, run.progress.step + 1)) is not None:
            self._say(text)


REASONS = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}


class LogHook(Hook):
    """Writes steps, evaluations and checkpoints, what the `backend` has to say once its kernels have run, and how the
    run ended, with `resume`, which says how it goes on; and measures how fast it is, from the time when it `began`."""

    def __init__(self, log: RunLog, backend: Backend, began: float, resume: str, *, is_saved: bool) -> None:
        self._log, self._backend, self._began, self._resume, self._is_saved = log, backend, began, resume, is_saved
        self._first_step_s = math.nan
        self.history = History()

    @property
    def has_stepped(self) -> bool:
        """Whether this process has done a step."""
        return "loss" in self.history

    def after_step(self, run: RunView, record: TrainRecord) -> None:
        """The step, where it gets a line; after the first one the algorithms that decide the run's bits."""
        is_first = not self.has_stepped
        self.history.add(record.step, record.values)
        if self._log.due(record.step, last=run.is_last) or not record.applied:
            self._log.train(record)
        if is_first:
            self._first_step_s = time.perf_counter() - self._began
            for text in self._backend.notices:
                self._log.notice(text)
            if self._backend.algorithms:
                self._log.record("algorithms", **self._backend.algorithms)

    def on_evaluate(self, run: RunView, record: EvalRecord | None) -> None:
        """The evaluation."""
        if record is not None:
            self.history.add(record.step, {f"eval_{name}": value for name, value in record.values.items()})
            self._log.evaluation(record)

    def on_save(self, run: RunView, path: Path, step: int) -> None:
        """The checkpoint."""
        self._is_saved = True
        self._log.say(f"Checkpoint: {path}")
        self._log.record("checkpoint", step=step, path=str(path))

    def on_rollback(self, run: RunView) -> None:
        """That what is known of later steps is void."""
        self.history.drop_after(run.progress.step)
        self._log.rollback(run.progress.step)

    def on_end(self, run: RunView, result: TrainResult) -> None:
        """How the run ended: what it came to, or how it resumes."""
        if (reason := REASONS.get(result.exit_code)) is not None:
            resume = f"Resume with:\n  {self._resume}" if self._is_saved else "Nothing is saved: start again."
            self._log.say(f"Stopped after step {result.steps}. {resume}", least=SUMMARY)
            self._log.end(reason)
            return
        parts = [f"training loss {result.train_loss:.4f}"]
        parts += [f"evaluation loss {result.eval_loss:.4f}"] if math.isfinite(result.eval_loss) else []
        parts += [f"{result.tokens_per_second:,.0f} tokens/s"] if math.isfinite(result.tokens_per_second) else []
        took = timedelta(seconds=round(time.perf_counter() - self._began))
        self._log.say(f"{result.steps:,} steps in {took}: {', '.join(parts)}", least=SUMMARY)
        losses = {"train_loss": result.train_loss, "eval_loss": result.eval_loss}
        self._log.end("failed" if result.exit_code else "finished", result.warnings, **losses)

    def result(self, now: Progress, light_s: float, **about: Any) -> TrainResult:
        """The run's metrics; the first step is left out of the speed where there are others.

        `light_s` are seconds for a token at the speed of light.
        """
        speeds = self.history.get("tps", np.array([]))
        steady = speeds[1:] if speeds.size > 1 else speeds
        speed = float(np.median(steady)) if steady.size else math.nan
        return TrainResult(
            steps=now.step,
            train_loss=now.train_loss,
            eval_loss=now.eval_loss,
            tokens_per_second=speed,
            sol=light_s * speed if steady.size else None,
            first_step_s=self._first_step_s,
            log_path=self._log.path,
            history=self.history,
            **about,
        )


class GpuWatch(Hook):
    """Readings of the GPU every N steps (`--log-gpu-util`), one at a time; `write` gets their records.

    NVML is read in a thread of its own while the step runs: what it says between two steps is that of an idle GPU, and
    counting PCIe traffic takes it 40 ms. Nothing waits for the reading but the end of its step.
    """

    def __init__(self, where: Device, every: int, write: Callable[[GpuRecord], None]) -> None:
        """UsageError if there is no GPU to read, or nothing that reads it; 0 steps ask for nothing."""
        self._every, self._write = every, write
        self._uuid = where.gpu.uuid if where.gpu else None
        self._reading: nvml.Background | None = None
        if not every or where.planned:
            return
        if self._uuid is None:
            raise UsageError(f"--log-gpu-util {every} needs a GPU, and this run is on the CPU: leave it out")
        if nvml.read(self._uuid) is None:
            raise UsageError(
                f"--log-gpu-util {every} needs NVML, which does not answer for this GPU: pip install nvidia-ml-py, or "
                "leave it out"
            )

    def during_step(self, run: RunView) -> None:
        """Starts a reading if the step gets one: the GPU works on the step from here on."""
        if self._every and (run.progress.step + 1) % self._every == 0:
            assert self._uuid is not None
            self._reading = nvml.Background(self._uuid, traffic=True)

    def after_step(self, run: RunView, record: TrainRecord) -> None:
        """Writes the reading of this step, once it is there; what NVML did not say is None."""
        if self._reading is None:
            return
        found, self._reading = self._reading.stop(), None
        reading = found[0] if found else nvml.Reading()
        used = None if reading.used_bytes is None else reading.used_bytes / MIB
        same = {one.name: getattr(reading, one.name) for one in fields(GpuRecord) if hasattr(reading, one.name)}
        self._write(GpuRecord(record.step, used_mib=used, **same))
