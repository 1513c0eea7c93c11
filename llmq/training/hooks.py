"""Hooks of the training loop: what is called at the moments of a run, what it sees then, and what it may ask for.

A hook sees a `RunView`, which is frozen, and asks by what it returns. All ranks have the same hooks, which must ask for
the same on each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Flag
from pathlib import Path
from typing import Any

from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine
from llmq.training.progress import Progress
from llmq.training.records import EvalRecord, TrainRecord, TrainResult

Watch = Callable[[TrainRecord | EvalRecord], None]


class Ask(Flag):
    """What a hook may ask of the loop: to evaluate or to save after this step, or that it is the run's last."""

    NOTHING = 0
    EVALUATE = 1
    SAVE = 2
    STOP = 4


@dataclass(frozen=True)
class RunView:
    """A run at one moment: how far it is, and of how many steps."""

    progress: Progress
    num_steps: int
    find_engine: Callable[[], Engine]

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

    def after_update(self, run: RunView) -> None:
        """The weights were updated; `run` is still that before the step."""

    def after_step(self, run: RunView, record: TrainRecord) -> Ask | None:
        """A step is done."""

    def on_evaluate(self, run: RunView, record: EvalRecord | None) -> Ask | None:
        """An evaluation is done; without held-out data it has no record."""

    def on_save(self, run: RunView, path: Path, step: int) -> None:
        """The checkpoint of a step is complete, which may be an earlier one than that of `run`."""

    def on_end(self, run: RunView, result: TrainResult) -> None:
        """The run has ended without an error."""


class Watcher(Hook):
    """Calls the `watch` of `llmq.train` with each record."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def after_step(self, run: RunView, record: TrainRecord) -> None:
        """Gives it the record of a step."""
        self._watch(record)

    def on_evaluate(self, run: RunView, record: EvalRecord | None) -> None:
        """Gives it the record of an evaluation."""
        if record is not None:
            self._watch(record)


class MethodHook(Hook):
    """Lets a method of adaptation do what it does around a step."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def before_step(self, run: RunView, batch: Batch) -> None:
        """What is due before the micro-steps."""
        run.engine.plan.tracked.before_step(run.engine, run.progress.step + 1)

    def after_update(self, run: RunView) -> None:
        """What belongs to the update."""
        if (text := run.engine.plan.tracked.after_update(run.engine, run.progress.step + 1)) is not None:
            self._say(text)
