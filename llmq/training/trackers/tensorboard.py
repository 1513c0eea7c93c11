"""TensorBoard: event files in a folder beside the log, written without TensorFlow or PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmq.screen import fact_lines
from llmq.training.trackers import TrackedRun, Tracker


class TensorBoard(Tracker):
    """An event file for each process; what a resume or a rollback drops is no longer shown."""

    package, install = "tensorboardX", 'install llmq with its extra [tensorboard], or `pip install "tensorboardX>=2.6"`'
    title = "TensorBoard"

    def open(self, run: TrackedRun) -> int:
        """Begins a file in the folder `tensorboard` beside the log, with the options as a text."""
        from tensorboardX import SummaryWriter

        first = None if run.resumed is None else run.resumed + 1
        # the library names files by the second; one that goes on is none that was begun in the same one
        suffix = "" if first is None else f".from-{first}"
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=first, filename_suffix=suffix)
        lines = "\n".join(f"    {line}" for line in fact_lines(run.config))
        self._writer.add_text("options", lines, run.resumed or 0)
        return -1

    def numbers(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def text(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table in Markdown."""
        table = [columns, ["---"] * len(columns), *rows]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in table), step)

    def back(self, step: int) -> bool:
        """What was written of later steps is no longer shown."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._writer.file_writer.add_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))
        return True

    def flush(self) -> None:
        """Writes the file on, so that TensorBoard shows it."""
        self._writer.flush()

    def close(self, end: Mapping[str, Any]) -> None:
        """Ends the file."""
        self._writer.close()


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
