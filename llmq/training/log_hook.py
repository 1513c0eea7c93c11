"""What the log gets at each moment of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from llmq.errors import INTERRUPTED, TERMINATED
from llmq.training.hooks import Hook, RunView
from llmq.training.log import SUMMARY, RunLog
from llmq.training.metrics import Metrics
from llmq.training.ready import Ready
from llmq.training.records import EvalRecord, TrainRecord
from llmq.training.result import TrainResult

NON_FINITE_LIMIT = 10  # consecutive steps without an update after which training gives up
REASONS = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}


class LogHook(Hook):
    """Writes notices, steps, evaluations and checkpoints, and how the run ended."""

    def __init__(self, ready: Ready, log: RunLog, metrics: Metrics) -> None:
        self._ready, self._log, self._metrics = ready, log, metrics
        self._is_saved = ready.results.resume is not None

    def on_begin(self, run: RunView) -> None:
        """What the user should know of the model, the data and the tokenizer, and what is wrong with the GPU."""
        for text in self._ready.results.notices:
            self._log.notice(text)
        for text in self._ready.results.warnings:
            self._log.warn(text)

    def after_step(self, run: RunView, record: TrainRecord) -> None:
        """The step, where it gets a line."""
        if self._log.due(record.step, last=run.is_last) or not record.applied:
            self._log.train(record)

    def on_evaluate(self, run: RunView, record: EvalRecord | None) -> None:
        """The evaluation."""
        if record is not None:
            self._log.evaluation(record)

    def on_save(self, run: RunView, path: Path, step: int) -> None:
        """The checkpoint."""
        self._is_saved = True
        self._log.checkpoint(path, step)

    def on_end(self, run: RunView, result: TrainResult) -> None:
        """How the run ended: what it came to, or how it resumes."""
        if (reason := REASONS.get(result.exit_code)) is not None:
            resume = (
                f"Resume with:\n  {self._ready.results.continue_command}"
                if self._is_saved
                else "Nothing is saved: start again."
            )
            self._log.say(f"Stopped after step {result.steps}. {resume}", least=SUMMARY)
            self._log.end(reason)
            return
        for line in _summary(result, self._metrics.seconds):
            self._log.say(line, least=SUMMARY)
        losses = {"train_loss": result.train_loss, "eval_loss": result.eval_loss}
        self._log.end("failed" if result.exit_code else "finished", result.warnings, **losses)


class BackendHook(Hook):
    """Writes what the device's backend has to say once its kernels have run: after the first step."""

    def __init__(self, ready: Ready, log: RunLog) -> None:
        self._backend, self._log, self._is_done = ready.backend, log, False

    def after_step(self, run: RunView, record: TrainRecord) -> None:
        """Its notices, and the algorithms that decide the run's bits."""
        if self._is_done:
            return
        self._is_done = True
        for text in self._backend.notices:
            self._log.notice(text)
        if self._backend.algorithms:
            self._log.record("algorithms", **self._backend.algorithms)


def _summary(result: TrainResult, seconds: float) -> Iterator[str]:
    """What a finished run came to: `12 steps in 0:03:10: training loss 3.1416, evaluation loss 3.2500, ...`."""
    parts = list(_losses(result.train_loss, result.eval_loss))
    parts += [f"{result.tokens_per_second:,.0f} tokens/s"] if math.isfinite(result.tokens_per_second) else []
    yield f"{result.steps:,} steps in {timedelta(seconds=round(seconds))}: {', '.join(parts)}"


def _losses(train_loss: float, eval_loss: float | None) -> Iterator[str]:
    yield f"training loss {train_loss:.4f}"
    if eval_loss is not None and math.isfinite(eval_loss):
        yield f"evaluation loss {eval_loss:.4f}"
