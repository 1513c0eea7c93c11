"""What a run trains on: its data, or that of each of several adapters, and the steps that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq.adapters import resolve as adapters
from llmq.data.batches.loader import Data, open_data
from llmq.data.batches.named_data import open_named
from llmq.data.batches.several import SeveralData
from llmq.data.batches.trained_template import ExportedTemplates
from llmq.errors import UsageError
from llmq.files.source import ModelSource
from llmq.hardware import device
from llmq.model.config import ModelConfig
from llmq.options.parse import Options
from llmq.options.sweep import MemberOptions
from llmq.screen import Report
from llmq.training.exported import exported_config, exported_tokenizer
from llmq.training.log import RunLog
from llmq.training.past import Past
from llmq.training.room import check_best
from llmq.training.schedule import Schedule, make_schedule, schedule_over
from llmq.training.several import MemberRun, member_runs, steps_of

UNKNOWN_STEPS = 1_000_000  # planned for where neither the data nor --steps says how long the run is


@dataclass(frozen=True)
class Trained:
    """The data of a run, its schedule, several adapters with theirs, and what the finished model is: its config, its
    tokenizer and templates."""

    data: Data
    schedule: Schedule
    members: tuple[MemberRun, ...]
    config: ModelConfig
    tokens: tuple[Path | None, ExportedTemplates]

    @property
    def writes(self) -> tuple[ModelConfig, Path | None, ExportedTemplates, int]:
        """What the completion of prompts depends on."""
        return (self.config, *self.tokens, self.data.train.num_virtual)


class TrainedOn:
    """The data that a run, or each of several adapters, names."""

    def __init__(
        self,
        options: Options,
        members: Sequence[MemberOptions],
        source: ModelSource,
        log: RunLog,
        past: Past,
        *,
        plans_only: bool,
    ) -> None:
        self.options, self.members, self.source, self.log, self.past = options, members, source, log, past
        self.runs = {one.name: one.options for one in members} or {"": options}
        # What is said of it stands in the log's section on data, but for work that takes place.
        about: dict[str, Any] = {"plan_only": plans_only, "say": log.say, "note": log.about_data}

        def task(title: str) -> AbstractContextManager[Report]:
            past.refuse_earlier(options)  # now, as tokenizing may take hours
            return log.task(title)

        self.named = {name: open_named(own.source, source, **about, task=task) for name, own in self.runs.items()}

    def open(self, cannot_pack: str | None, size: int, notices: list[str]) -> Trained:
        """All of it, on so many ranks; `cannot_pack` says why the device cannot run packed rows, if it cannot."""
        each = {name: self._data(name, cannot_pack, size) for name in self.runs}
        data = SeveralData.of(each) if self.members else each[""]
        if self.past.path and "data" not in self.past.checkpoints.resets:
            data.layout.refuse_other(self.past.state)
        config = exported_config(self.source, data, notices)
        schedule = self._schedule(each, data, self.past)
        members = member_runs(self.members, self.named, each, schedule.steps, schedule.start)
        tokens = exported_tokenizer(self.source, next(iter(self.named.values())), data)
        return Trained(data, schedule, members, config, tokens)

    def _data(self, name: str, cannot_pack: str | None, size: int) -> Data:
        options, config = self.runs[name], self.source.config
        about: dict[str, Any] = {"tokenizer": self.source.required_tokenizer, "named": self.named[name]}
        if (trained := adapters.resolve(options.adapters, config)).num_virtual:
            about["num_virtual"] = trained.num_virtual
        seed = device.seed_of(options.system)
        return open_data(options.data, config.vocab_size, seed, world=size, cannot_pack=cannot_pack, **about)

    def _schedule(self, each: Mapping[str, Data], data: Data, past: Past) -> Schedule:
        """The schedule; UsageError if the checkpoint is beyond its end, or if it lacks evaluations that are asked for.

        Without data, an epoch is long enough for any.
        """
        if data.is_there:
            check_best(past.checkpoints, data, evaluates=self.log.eval_due(0, last=True))
        start = past.step if "lr" in past.checkpoints.resets else past.state.get("rate_from", 0)
        if self.members:
            schedule = schedule_over(self.options.schedule, steps_of(self.members, each, UNKNOWN_STEPS), start)
        else:
            samples = data.train.num_windows if data.is_there else UNKNOWN_STEPS * data.samples_per_step
            schedule = make_schedule(self.options.schedule, samples, data.samples_per_step, start)
        if past.step > schedule.steps:
            raise UsageError(
                f"{past.path} is of step {past.step}, and this run ends after {schedule.steps}: raise --steps or "
                "--epochs, or continue from an earlier checkpoint"
            )
        return schedule
