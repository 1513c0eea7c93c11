"""A callback that keeps the report of a run up to date while it trains: `--callback report`."""

from __future__ import annotations

import time
from pathlib import Path

from llmq.errors import LlmqError
from llmq.report.page import write_report
from llmq.report.read import read_log
from llmq.training.callbacks import Callback, Run
from llmq.training.records import EvalRecord, TrainResult

LEAST_PAUSE = 100  # times what writing took, before an evaluation writes again: 1% of a run's time at most


class Report(Callback):
    """Writes the report at evaluations, while that costs little, and at the end: to `path`, or beside the log as
    report.html. What cannot be written is a warning."""

    def __init__(self, path: str | None = None) -> None:
        self._path = Path(path) if path else None
        self._due = 0.0  # not before this time, by the monotonic clock

    def on_evaluate(self, run: Run, record: EvalRecord) -> None:
        """Writes it, if the last time is long enough ago."""
        began = time.monotonic()
        if began >= self._due:
            self._write(run)
            self._due = time.monotonic() + LEAST_PAUSE * (time.monotonic() - began)

    def on_end(self, run: Run, result: TrainResult) -> None:
        """Writes it with the end of the run."""
        self._write(run)

    def _write(self, run: Run) -> None:
        log = Path(run.options["log_file"])
        try:
            write_report([read_log(log)], self._path or log.parent / "report.html")
        except LlmqError as error:
            run.warn(f"The report is not written: {error}")
