"""Steps and evaluations as lines of CSV: a tracker is a callback."""

import csv
from pathlib import Path

from llmq import Callback, Run
from llmq.training.records import EvalRecord, TrainRecord


class CsvLog(Callback):
    """Adds `step,name,loss` to a file, by default losses.csv beside the model."""

    def __init__(self, path: str = "") -> None:
        self.path = path

    def on_begin(self, run: Run) -> None:
        """Chooses the file."""
        self.path = self.path or str(run.model_path.parent / "losses.csv")

    def on_step(self, run: Run, record: TrainRecord) -> None:
        """The loss of a step."""
        self._write(record.step, "loss", record.loss)

    def on_evaluate(self, run: Run, record: EvalRecord) -> None:
        """The loss on held-out data."""
        self._write(record.step, "eval_loss", record.loss)

    def _write(self, *values: object) -> None:
        with Path(self.path).open("a", newline="") as file:
            csv.writer(file).writerow(values)
