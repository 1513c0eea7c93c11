"""What a run does with a step that is not finite, and with a loss that jumps: hooks, which see what all ranks have
agreed on and so ask for the same on each of them.

A step that is not finite changes no weight: the device decides that, and says so with the loss. A spike is a loss more
than z standard deviations above the mean of the last ones. What is above ten times in a row is no spike but where the
loss is now: the window begins again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine, StepResult
from llmq.errors import NonFiniteError, RefusedStepError
from llmq.training.hooks import Ask, Hook, RunView
from llmq.training.log import RunLog
from llmq.training.ranks import Ranks
from llmq.training.records import TrainRecord

if TYPE_CHECKING:
    from llmq.options.run import FaultOptions

NON_FINITE_LIMIT = 10  # consecutive steps that are not finite after which training gives up
LEVEL = 10  # consecutive spikes that are none
LEAST_RISE = 1e-3  # of the mean: beyond rounding

Where = Callable[[RunView], str]  # in words, what made a step not finite


def skips_spikes(options: FaultOptions) -> bool:
    """Whether the update reads a limit of the loss."""
    return options.on_spike == "skip"


def engine_of(options: FaultOptions) -> type[Engine]:
    """What runs the plan."""
    if not options.debug_nan:
        return Engine
    from llmq.engine.checked import CheckedEngine

    return CheckedEngine


def fault_hooks(options: FaultOptions, log: RunLog, ranks: Ranks) -> tuple[Hook, ...]:
    """The hooks that the options ask for."""
    about = (log, _found_by(ranks) if options.debug_nan else lambda run: "")
    kinds = {"skip": NonFinite, "stop": Stopping, "rollback": GoingBack}
    spikes = {"warn": Spikes, "skip": SkippedSpikes, "rollback": UndoneSpikes}
    found: list[Hook] = [kinds[options.on_nonfinite](*about)]
    if options.on_spike is not None:
        found.append(spikes[options.on_spike](log, options.spike_window, options.spike_zscore))
    return tuple(found)


def _found_by(ranks: Ranks) -> Where:
    """The first bad call of all ranks, in words."""

    def where(run: RunView) -> str:
        found = [one for one in ranks.all_of(run.engine.bad) if one is not None]  # type: ignore[attr-defined]
        return f"; {min(found)[-1]}" if found else "; computed once more, every number of it was finite"

    return where


class NonFinite(Hook):
    """Says that a step was not finite, and ends the run after many of them in a row."""

    def __init__(self, log: RunLog, where: Where) -> None:
        self._log, self._where, self._found = log, where, ""

    def after_update(self, run: RunView, done: StepResult) -> None:
        """Looks for what was not finite."""
        if not done.is_finite:
            self._found = self._where(run)

    def after_step(self, run: RunView, record: TrainRecord) -> Ask | None:
        """Reports the step. NonFiniteError if it is one too many."""
        if math.isfinite(record.loss) and math.isfinite(record.norm):
            return None
        self._log.notice(f"Step {record.step} changed nothing: its loss or gradient is not finite{self._found}")
        return self._refused(run, record)

    def _refused(self, run: RunView, record: TrainRecord) -> Ask | None:
        if run.progress.rejected == NON_FINITE_LIMIT:
            raise NonFiniteError(
                f"loss or gradient was not finite in the last {NON_FINITE_LIMIT} steps up to step {record.step}, none "
                f"of which changed the weights: lower --learning-rate, set --grad-clip, or use a wider --matmul-dtype"
                f"{self._found}"
            )
        return None


class GoingBack(NonFinite):
    """Asks to go back instead."""

    def _refused(self, run: RunView, record: TrainRecord) -> Ask:
        return Ask.ROLLBACK


class Stopping(NonFinite):
    """Ends the run, as after the step before."""

    def after_update(self, run: RunView, done: StepResult) -> None:
        """RefusedStepError for the first step that is not finite."""
        super().after_update(run, done)
        if not done.is_finite:
            step = run.progress.step + 1
            raise RefusedStepError(
                f"step {step} is not finite: loss {done.loss:.6g}, norm of the gradient {done.norm:.6g}{self._found}. "
                "Resumed with --continue, the run computes it again: with --debug-nan to see where it begins, or with "
                "--on-nonfinite skip to leave it out"
            )


class Spikes(Hook):
    """Says which losses are spikes."""

    key = "spikes"
    ask = Ask.NOTHING
    done = ""

    def __init__(self, log: RunLog, window: int, zscore: float) -> None:
        self._log, self._zscore = log, zscore
        self._losses: deque[float] = deque(maxlen=window)
        self._in_a_row = 0

    def state(self) -> dict[str, Any]:
        """The losses of the window, and the spikes since the last of them."""
        return {"losses": list(self._losses), "in_a_row": self._in_a_row}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes both."""
        self._losses = deque(state["losses"], self._losses.maxlen)
        self._in_a_row = state["in_a_row"]

    @property
    def limit(self) -> float:
        """The largest loss of the next step that is no spike."""
        if len(self._losses) < (self._losses.maxlen or 0):
            return math.inf
        mean = fmean(self._losses)
        return mean + max(self._zscore * self._deviation(mean), LEAST_RISE * abs(mean))

    def _deviation(self, mean: float) -> float:
        return math.sqrt(fmean((loss - mean) ** 2 for loss in self._losses))

    def _is_spike(self, record: TrainRecord) -> bool:
        return record.loss > self.limit

    def after_step(self, run: RunView, record: TrainRecord) -> Ask:
        """Compares a finite loss with the window, which it then enters if it is no spike."""
        if not (math.isfinite(record.loss) and math.isfinite(record.norm)):
            return Ask.NOTHING
        if not self._is_spike(record):
            self._losses.append(record.loss)
            self._in_a_row = 0
            return Ask.NOTHING
        self._in_a_row += 1
        mean = fmean(self._losses)
        score = (record.loss - mean) / (self._deviation(mean) or math.inf)
        self._log.notice(
            f"Step {record.step}: the loss of {record.loss:.4f} is a spike, {score:.1f} standard deviations above the "
            f"{mean:.4f} of the last {len(self._losses)}{self.done}",
            spike={"loss": record.loss, "mean": mean, "zscore": score},
        )
        if self._in_a_row == LEVEL:
            self._log.notice(f"{LEVEL} spikes in a row are where the loss is now: later ones are compared with these")
            self._losses.clear()
            self._in_a_row = 0
        return self.ask


class SkippedSpikes(Spikes):
    """Has the device apply no update of a loss above the limit."""

    done = ": its update is skipped"

    def before_step(self, run: RunView, batch: Batch) -> None:
        """Writes the limit, which the update reads."""
        run.engine.write(run.engine.plan.cells.loss_limit, np.array([self.limit]))

    def _is_spike(self, record: TrainRecord) -> bool:
        return not record.applied


class UndoneSpikes(Spikes):
    """Asks to go back."""

    ask = Ask.ROLLBACK
