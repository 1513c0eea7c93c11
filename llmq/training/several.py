"""Several adapters in one run: data, schedule and export of each, its share of every step, and a table of them all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmq.adapters.several import Several
from llmq.data.batches.loader import Data
from llmq.data.batches.named_data import NamedData
from llmq.data.tokens.rebuilt_tokenizer import rebuilt_warning
from llmq.engine.engine import GroupResult
from llmq.files.huggingface import open_export
from llmq.files.source import ModelSource
from llmq.model.config import FAMILIES
from llmq.model.parameters import num_parameters
from llmq.options.parse import Options
from llmq.options.sweep import MemberOptions
from llmq.plan.plan import Plan
from llmq.row import Row
from llmq.training.exported import OpenedExports, exported_tokenizer
from llmq.training.progress import MemberProgress
from llmq.training.schedule import Schedule, num_steps, schedule_over

TITLES = ("name", "rank", "alpha", "maps", "parameters", "rows", "rate", "seed", "epochs", "data")


@dataclass(frozen=True)
class MemberRun:
    """One of several adapters of a run: what its entry says, its options as those of a run of it alone, and what
    follows from them."""

    name: str
    given: Mapping[str, Any]
    options: Options
    data: Data
    named: NamedData | None
    schedule: Schedule


def steps_of(members: Sequence[MemberOptions], data: Mapping[str, Data], unknown: int) -> int:
    """Steps of the run: --steps, or until every adapter has seen its data in --epochs passes. `unknown` are those of an
    adapter without data, in a plan. UsageError."""
    found = []
    for one in members:
        own = data[one.name]
        samples = own.train.num_windows if own.is_there else unknown * own.samples_per_step
        found.append(num_steps(one.options.schedule, samples, own.samples_per_step))
    return max(found)


def member_runs(
    members: Sequence[MemberOptions],
    named: Mapping[str, NamedData | None],
    data: Mapping[str, Data],
    steps: int,
    start: int,
) -> tuple[MemberRun, ...]:
    """The adapters in a run of so many steps, whose schedules began at the step `start`. UsageError."""
    found = []
    for one in members:
        schedule = schedule_over(one.options.schedule, steps, start)
        found.append(MemberRun(one.name, one.given, one.options, data[one.name], named[one.name], schedule))
    return tuple(found)


def open_exports(
    members: Sequence[MemberRun], options: Options, source: ModelSource, plan: Plan, *, replaces: bool
) -> OpenedExports | None:
    """Where each adapter goes: to a folder of its name in --out-dir, with the tokenizer and templates of its data; None
    of a run that has not several."""
    config, several, found = plan.spec.config, plan.spec.adapters, []
    if not isinstance(several, Several):
        return None
    notices: list[str] = []
    revision = None if source.revision is None else source.revision.partition(",")[0]
    for one in members:
        adapters = several.by_name[one.name].adapters
        rows, make = adapters.file(own_rows(plan, one.name), config, source.name, revision, None)
        tokenizer, templates = exported_tokenizer(source, one.named, one.data)
        notices += [text for text in templates.notices if text not in notices]
        made: dict[str, Any] = {"default": "fp32", "make": make}
        export = open_export(options.export, config, rows, tokenizer, templates.sources, replaces=replaces, **made)
        found.append(replace(export, folder=Path(export.folder) / one.name))
    warning = rebuilt_warning(tokenizer, FAMILIES[config.architecture].model_type)
    return OpenedExports(tuple(found), tuple(notices), warning)


def own_rows(plan: Plan, name: str) -> tuple[Row, ...]:
    """The rows of one of several adapters."""
    return tuple(row for row in plan.rows if row.adapter == name)


def listed_members(members: Sequence[MemberRun], plan: Plan) -> Iterator[str]:
    """A line for each adapter, below their titles."""
    several, rows = plan.spec.adapters, [TITLES]
    assert isinstance(several, Several)
    for one in members:
        member, flat = several.by_name[one.name], one.options.to_flat()
        ranks = sorted({target.rank for target in member.adapters.targets})
        alphas = sorted({target.alpha for target in member.adapters.targets})
        seen = one.schedule.steps * one.data.samples_per_step
        epochs = f"{seen / count:.2f}" if (count := one.data.train.num_windows) else "-"
        named = flat["data"] or flat["train_file"] or ["-"]
        rows.append(
            (
                one.name,
                "-".join(map(str, ranks[:: max(len(ranks) - 1, 1)])),
                "-".join(f"{alpha:g}" for alpha in alphas[:: max(len(alphas) - 1, 1)]),
                str(len(member.adapters.targets)),
                f"{num_parameters(own_rows(plan, one.name)):,}",
                str(member.rows),
                f"{one.schedule.peak:g}",
                str(member.seed),
                epochs,
                ", ".join(named),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *middle, last in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(middle, widths[1:-1], strict=True))
        yield "  ".join([f"{name:<{widths[0]}}", *cells, last])


def progress_after(
    before: Mapping[str, MemberProgress], names: Sequence[str], each: Sequence[GroupResult]
) -> dict[str, MemberProgress]:
    """The progress of every adapter after a step with these results."""
    pairs = zip(names, each, strict=True)
    return {name: before.get(name, MemberProgress()).after(one.loss, applied=one.applied) for name, one in pairs}


def step_records(members: Sequence[MemberRun], each: Sequence[GroupResult], step: int) -> dict[str, dict[str, Any]]:
    """What the log has of every adapter in a step."""
    return {
        member.name: {
            "loss": one.loss,
            "norm": one.norm,
            "lr": member.schedule.learning_rate(step),
            "trained_tokens": one.num_tokens,
            "applied": one.applied,
        }
        for member, one in zip(members, each, strict=True)
    }


def evaluated(
    before: Mapping[str, MemberProgress], names: Sequence[str], each: Sequence[tuple[float, int]]
) -> tuple[dict[str, MemberProgress], dict[str, dict[str, Any]]]:
    """The progress of every adapter after an evaluation that has found these sums of loss and tokens, and what the log
    has of those that have held-out data."""
    now, records = dict(before), dict[str, dict[str, Any]]()
    for name, (total, trained) in zip(names, each, strict=True):
        own = before.get(name, MemberProgress())
        if trained:
            loss = total / trained
            records[name] = {"loss": loss, "train_loss": own.mean_loss, "trained_tokens": trained}
            now[name] = own.evaluated(loss)
    return now, records
