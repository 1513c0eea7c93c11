"""What a finished run leaves: its model, or its adapter and with --merge the model with it, unless they are ruined."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np

from llmq.adapters.base_record import BASE, AdapterBase, merged_record, weights_of
from llmq.adapters.base_record import MERGED as MERGED_RECORD
from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine
from llmq.errors import NonFiniteError
from llmq.files.huggingface import Export, remove_model
from llmq.row import Row
from llmq.training.allocation import Allocation
from llmq.training.evaluation import mean_losses
from llmq.training.exported import MERGED
from llmq.training.health import all_finite
from llmq.training.job import Job
from llmq.training.log import SUMMARY, RunLog
from llmq.training.progress import MemberProgress, Progress
from llmq.training.ranks import Ranks


@dataclass(frozen=True)
class Left:
    """The folders that were written, of several adapters by their names, and warnings about what is in them.

    `is_whole`: nothing was left out as it is ruined.
    """

    model_path: Path | None
    merged_path: Path | None
    warnings: list[str]
    is_whole: bool
    adapters: Mapping[str, Path] = field(default_factory=dict)


def export_all(
    job: Job, engine: Engine, allocation: Allocation, now: Progress, batch: Batch, ranks: Ranks, log: RunLog
) -> Left:
    """Writes the model, or of an adapter what the `allocation` of ranks kept, unless it is ruined, with warnings about
    the run; those about the model say how to continue.

    A ruined one is written with --export-anyway. Weights are checked on their way to the disk, and the last update by
    what the loss of a `batch` is now.
    """
    loss, *each = mean_losses(engine, batch, ranks.world)
    course = now.course.warnings(job.plan.spec.config.vocab_size, loss)
    if job.members:
        left = _export_each(job, engine, now, each, ranks, log)
    else:
        left = _export_one(job, engine, allocation, now, loss, ranks, log)
    return replace(left, warnings=[*course, *left.warnings])


def _export_one(
    job: Job, engine: Engine, allocation: Allocation, now: Progress, loss: float | None, ranks: Ranks, log: RunLog
) -> Left:
    """Writes the model or the adapter, and with --merge both as one."""
    reasons = _ruin(now, now.rejected, now.eval_loss, loss)
    bad: dict[str, None] = {}
    model = merged = None
    if not reasons or job.exports_anyway:
        with suppress(NonFiniteError):
            export = _with_base(allocation.exported(engine, job.exports[0]), job, engine)
            model = _written(export, "Exporting", job, engine, ranks, log, bad)
            log.say(f"Exported: {model}", least=SUMMARY)
            for export in job.exports[1:]:
                about = {MERGED_RECORD: merged_record(job.source, [model])} if ranks.is_first else {}
                merged = _written(replace(export, beside=about), "Merging", job, engine, ranks, log, bad)
                log.say(f"Merged into {_base(job)}: {merged}", least=SUMMARY)
            if merged is None and ranks.is_first and job.exports[0].overwrite and remove_model(model / MERGED):
                log.say(f"Removed what an earlier run merged: {model / MERGED}", least=SUMMARY)
    if bad:
        reasons.append(_not_finite(bad))
    if model is not None:
        return Left(model, merged, [f"The model is exported although {why}" for why in reasons], is_whole=True)
    return Left(None, None, [f"No model is exported: {reasons[0]}. {_way_back(job, now)}"], is_whole=False)


def _with_base(export: Export, job: Job, engine: Engine) -> Export:
    """The export of an adapter, with what it was trained on."""
    if not engine.plan.spec.adapters.freezes:
        return export
    base = AdapterBase(job.base or weights_of(job.source, job.seed), engine.plan.held_base)
    return replace(export, beside={BASE: base.to_json()})


def _ruin(now: Progress, rejected: int, eval_loss: float | None, after: float | None) -> list[str]:
    """Why the model, or one of several adapters, is ruined by its last step, if it is."""
    if rejected:
        return [f"the last step, {now.step}, changed nothing: it was not finite"]
    if now.evaluated == now.step and eval_loss is not None and not math.isfinite(eval_loss):
        return [f"the loss of the last evaluation is {eval_loss}"]
    return [f"after the last step the loss of a batch is {after}"] if after and not math.isfinite(after) else []


def _not_finite(bad: Mapping[str, None]) -> str:
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"the weights of {next(iter(bad))}{more} are not all finite"


def _export_each(
    job: Job, engine: Engine, now: Progress, losses: Sequence[float | None], ranks: Ranks, log: RunLog
) -> Left:
    """Writes each of several adapters that is not ruined, as `_export_one` does one."""
    found: dict[str, Path] = {}
    warnings = []
    for name, export, loss in zip(job.names, job.exports, losses, strict=True):
        own, bad = now.each.get(name, MemberProgress()), dict[str, None]()
        reasons = _ruin(now, own.rejected, own.eval_loss, loss)
        if not reasons or job.exports_anyway:
            with suppress(NonFiniteError):
                found[name] = _written(
                    _with_base(export, job, engine), f"Exporting {name}", job, engine, ranks, log, bad
                )
                log.say(f"Exported: {found[name]}", least=SUMMARY)
        reasons += [_not_finite(bad)] if bad else []
        if name in found:
            warnings += [f"Adapter {name} is exported although {why}" for why in reasons]
        else:
            warnings.append(f"Adapter {name} is not exported: {reasons[0]}. Lower its learning_rate")
    is_whole = len(found) == len(job.members)
    return Left(job.exports[0].folder.parent if found else None, None, warnings, is_whole, found)


def _written(
    what: Export, title: str, job: Job, engine: Engine, ranks: Ranks, log: RunLog, bad: dict[str, None]
) -> Path:
    """The folder of an export, by the first rank, once it is complete; the other ranks read along.

    Rows that are not finite are added to `bad`, and raise NonFiniteError unless they are exported anyway.
    """
    done = count(1)

    def read(row: Row) -> np.ndarray:
        values = engine.parameter(row.name)
        report(min(next(done), len(what.rows)), len(what.rows))
        if not all_finite(values):
            bad[row.name] = None
            if not job.exports_anyway:
                raise NonFiniteError
        return values

    with ranks.long(title.lower()), log.task(title) as report:
        path = what.write(read) if ranks.is_first else what.read_along(read)
        ranks.agreed(None)  # what follows would wait for the first one without saying so
        return path


def _base(job: Job) -> str:
    """What the run was trained on, in words."""
    held = job.plan.spec.adapters.base
    return f"the base in {held}" if held else "the base"


def _way_back(job: Job, now: Progress) -> str:
    """How to continue after a run that was ruined."""
    others = job.checkpoints.others(now.step)
    again = f"resume from one of the checkpoints of {others} with --continue STEP" if others else "start again"
    return (
        f"Lower --learning-rate, or raise --warmup, and {again}. To get this model all the same, use --continue "
        "--export-anyway"
    )
