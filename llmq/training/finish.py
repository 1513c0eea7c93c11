"""What a finished run leaves: its model, or its adapter and with --merge the model with it, unless they are ruined."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from llmq.training.evaluation import mean_losses
from llmq.training.exports import MERGED
from llmq.training.health import all_finite
from llmq.training.log import SUMMARY, RunLog
from llmq.training.progress import Progress
from llmq.training.ranks import Ranks
from llmq.training.ready import Ready
from llmq.training.result import TrainResult


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

    def added_to(self, result: TrainResult) -> TrainResult:
        """The result of the run with all of this."""
        adapters = {name: replace(one, path=self.adapters.get(name)) for name, one in result.adapters.items()}
        result = replace(result, model_path=self.model_path, merged_path=self.merged_path)
        return replace(result, adapters=adapters, warnings=tuple(self.warnings))


def export_all(run: Ready, engine: Engine, now: Progress, batch: Batch, ranks: Ranks, log: RunLog) -> Left:
    """Writes the model, the adapter or each of several, unless it is ruined, with warnings about the run; those about
    the model say how to continue.

    A ruined one is written with --export-anyway. Weights are checked on their way to the disk, and the last update by
    what the loss of a `batch` is now.
    """
    losses = mean_losses(engine, batch, ranks.world)
    course = now.course.warnings(run.plan.spec.config.vocab_size, losses[""])
    if run.trains.members:
        left = _export_each(run, engine, now, losses, ranks, log)
    else:
        left = _export_one(run, engine, now, losses[""], ranks, log)
    return replace(left, warnings=[*course, *left.warnings])


def _export_one(run: Ready, engine: Engine, now: Progress, loss: float | None, ranks: Ranks, log: RunLog) -> Left:
    """Writes the model or the adapter, and with --merge both as one."""
    reasons = _ruin(now, now.rejected, now.eval_loss, loss)
    bad: dict[str, None] = {}
    model = merged = None
    if not reasons or run.results.exports_anyway:
        with suppress(NonFiniteError):
            chosen = run.plan.spec.adapters.exported(run.results.exports[0], engine.plan.tracked, engine)
            export = _with_base(chosen, run, engine)
            model = _written(export, "Exporting", run, engine, ranks, log, bad)
            log.say(f"Exported: {model}", least=SUMMARY)
            for export in run.results.exports[1:]:
                about = {MERGED_RECORD: merged_record(run.source, [model])} if ranks.is_first else {}
                merged = _written(replace(export, beside=about), "Merging", run, engine, ranks, log, bad)
                log.say(f"Merged into {_base(run)}: {merged}", least=SUMMARY)
            if merged is None and ranks.is_first and run.results.exports[0].overwrite and remove_model(model / MERGED):
                log.say(f"Removed what an earlier run merged: {model / MERGED}", least=SUMMARY)
    if bad:
        reasons.append(_not_finite(bad))
    if model is not None:
        return Left(model, merged, [f"The model is exported although {why}" for why in reasons], is_whole=True)
    return Left(None, None, [f"No model is exported: {reasons[0]}. {_way_back(run, now)}"], is_whole=False)


def _with_base(export: Export, run: Ready, engine: Engine) -> Export:
    """The export of an adapter, with what it was trained on."""
    if not engine.plan.spec.adapters.freezes:
        return export
    base = AdapterBase(run.base or weights_of(run.source, run.plan.spec.seed), engine.plan.held_base)
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
    run: Ready, engine: Engine, now: Progress, losses: Mapping[str, float | None], ranks: Ranks, log: RunLog
) -> Left:
    """Writes each of several adapters that is not ruined, as `_export_one` does one."""
    found: dict[str, Path] = {}
    warnings = []
    for name, export in zip([member.name for member in run.trains.members], run.results.exports, strict=True):
        own, bad = now.group(name), dict[str, None]()
        reasons = _ruin(now, own.rejected, own.eval_loss, losses[name])
        if not reasons or run.results.exports_anyway:
            with suppress(NonFiniteError):
                found[name] = _written(
                    _with_base(export, run, engine), f"Exporting {name}", run, engine, ranks, log, bad
                )
                log.say(f"Exported: {found[name]}", least=SUMMARY)
        reasons += [_not_finite(bad)] if bad else []
        if name in found:
            warnings += [f"Adapter {name} is exported although {why}" for why in reasons]
        else:
            warnings.append(f"Adapter {name} is not exported: {reasons[0]}. Lower its learning_rate")
    is_whole = len(found) == len(run.trains.members)
    return Left(run.results.exports[0].folder.parent if found else None, None, warnings, is_whole, found)


def _written(
    what: Export, title: str, run: Ready, engine: Engine, ranks: Ranks, log: RunLog, bad: dict[str, None]
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
            if not run.results.exports_anyway:
                raise NonFiniteError
        return values

    with ranks.long(title.lower()), log.task(title) as report:
        path = what.write(read) if ranks.is_first else what.read_along(read)
        ranks.agreed(None)  # what follows would wait for the first one without saying so
        return path


def _base(run: Ready) -> str:
    """What the run was trained on, in words."""
    held = run.plan.spec.adapters.base
    return f"the base in {held}" if held else "the base"


def _way_back(run: Ready, now: Progress) -> str:
    """How to continue after a run that was ruined."""
    others = run.results.checkpoints.others(now.step)
    again = f"resume from one of the checkpoints of {others} with --continue STEP" if others else "start again"
    return (
        f"Lower --learning-rate, or raise --warmup, and {again}. To get this model all the same, use --continue "
        "--export-anyway"
    )
