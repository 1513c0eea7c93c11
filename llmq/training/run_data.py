"""What a run trains on: its data, and the steps that follow from it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from llmq.adapters import resolve as adapters
from llmq.data.batches.loader import Data, open_data
from llmq.data.batches.named_data import open_named
from llmq.errors import UsageError
from llmq.files.checkpoint import EVAL_LOSS, Checkpoints
from llmq.files.source import ModelSource
from llmq.hardware import device
from llmq.model.config import ModelConfig
from llmq.options.parse import Options
from llmq.screen import Report
from llmq.training.earlier_run import EarlierRun
from llmq.training.exports import Tokens, exported_config, exported_tokenizer
from llmq.training.log import RunLog
from llmq.training.schedule import Schedule, make_schedule

UNKNOWN_STEPS = 1_000_000  # planned for where neither the data nor --steps says how long the run is


@dataclass(frozen=True)
class RunData:
    """The data of a run, its schedule, and what the finished model is: its config, its tokenizer and templates."""

    data: Data
    schedule: Schedule
    config: ModelConfig
    tokens: Tokens


class NamedRunData:
    """The data that a run names, which is tokenized if it is not."""

    def __init__(
        self, options: Options, source: ModelSource, log: RunLog, earlier: EarlierRun, *, plans_only: bool
    ) -> None:
        self._options, self._source, self._log, self._earlier = options, source, log, earlier
        # Lines on data go below the log's section on it, but those on work that takes place.
        about: dict[str, Any] = {"plan_only": plans_only, "say": log.say, "note": log.about_data}

        def task(title: str) -> AbstractContextManager[Report]:
            earlier.refuse_to_mix(options)  # now, as tokenizing may take hours
            return log.task(title)

        self._named = open_named(options.source, source, **about, task=task)

    def open(self, cannot_pack: str | None, size: int, notices: list[str]) -> RunData:
        """All of it, on `size` ranks; `cannot_pack` says why the device cannot run packed rows, if it cannot."""
        data = self._open(cannot_pack, size)
        if self._earlier.path and "data" not in self._earlier.checkpoints.resets:
            data.layout.refuse_other(self._earlier.state)
        config = exported_config(self._source, data, notices)
        return RunData(data, self._schedule(data), config, exported_tokenizer(self._source, self._named, data))

    def _open(self, cannot_pack: str | None, size: int) -> Data:
        options, config = self._options, self._source.config
        about: dict[str, Any] = {"tokenizer": self._source.required_tokenizer, "named": self._named}
        if (trained := adapters.resolve(options.adapters, config)).num_virtual:
            about["num_virtual"] = trained.num_virtual
        seed = device.seed_of(options.system)
        return open_data(options.data, config.vocab_size, seed, world=size, cannot_pack=cannot_pack, **about)

    def _schedule(self, data: Data) -> Schedule:
        """The schedule; UsageError if the checkpoint is beyond its end, or if it lacks evaluations that are asked for.

        Without data, an epoch is long enough for any run.
        """
        earlier = self._earlier
        if data.is_there:
            _check_best(earlier.checkpoints, data, evaluates=self._log.eval_due(0, last=True))
        start = earlier.step if "lr" in earlier.checkpoints.resets else earlier.state.get("rate_from", 0)
        schedule = make_schedule(self._options.schedule, *_samples(data), start)
        if earlier.step > schedule.steps:
            raise UsageError(
                f"{earlier.path} is of step {earlier.step}, and this run ends after {schedule.steps}: raise --steps or "
                "--epochs, or continue from an earlier checkpoint"
            )
        return schedule


def _samples(data: Data) -> tuple[int | None, int]:
    """Samples of an epoch (None: not known), and those of a step."""
    per_step = data.samples_per_step
    return data.train.num_windows if data.is_there else UNKNOWN_STEPS * per_step, per_step


def _check_best(checkpoints: Checkpoints, data: Data, *, evaluates: bool) -> None:
    """UsageError if the best checkpoint is to be kept and nothing is evaluated."""
    if checkpoints.saves_best and (data.eval is None or not evaluates):
        raise UsageError(
            f"--save-best {EVAL_LOSS} goes by evaluations, and this run makes none: give evaluation data and "
            "--eval-every-n-steps above 0, or leave it out"
        )
