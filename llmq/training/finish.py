"""What a finished run leaves: its model, or its adapter and with --merge the model with it, unless they are ruined."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from llmq.adapters.resolve import BASE, AdapterBase, merged_record, weights_of
from llmq.adapters.resolve import MERGED as MERGED_RECORD
from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine
from llmq.errors import NonFiniteError
from llmq.files.huggingface import Export, remove_model
from llmq.row import Row
from llmq.training.evaluation import mean_loss
from llmq.training.exports import MERGED
from llmq.training.health import all_finite
from llmq.training.log import SUMMARY, RunLog
from llmq.training.progress import Progress
from llmq.training.ranks import Ranks
from llmq.training.ready import Ready
from llmq.training.result import TrainResult


@dataclass(frozen=True)
class Left:
    """The folders that were written, and warnings about what is in them. `is_whole`: nothing was left out as it is
    ruined."""

    model_path: Path | None
    merged_path: Path | None
    warnings: list[str]
    is_whole: bool

    def added_to(self, result: TrainResult) -> TrainResult:
        """The result of the run with all of this."""
        result = replace(result, model_path=self.model_path, merged_path=self.merged_path)
        return replace(result, warnings=tuple(self.warnings))


def export_all(run: Ready, engine: Engine, now: Progress, batch: Batch, ranks: Ranks, log: RunLog) -> Left:
    """Writes the model or the adapter, unless it is ruined, with warnings about the run; those about the model say how
    to continue.

    A ruined one is written with --export-anyway. Weights are checked on their way to the disk, and the last update by
    what the loss of a `batch` is now.
    """
    loss = mean_loss(engine, batch, ranks.world)
    warnings = now.course.warnings(run.plan.spec.config.vocab_size, loss)
    to_disk, (export, *merged) = _ToDisk(run, engine, ranks, log), run.results.exports
    reasons, bad, path = _ruin(now, loss), dict[str, None](), None
    if not reasons or run.results.exports_anyway:
        with suppress(NonFiniteError):
            path = to_disk.write(to_disk.finished(export), "Exporting", bad)
            log.say(f"Exported: {path}", least=SUMMARY)
    reasons += [_not_finite(bad)] if bad else []
    if path is None:
        warnings.append(f"No model is exported: {reasons[0]}. {_way_back(run, now)}")
        return Left(None, None, warnings, is_whole=False)
    warnings += [f"The model is exported although {why}" for why in reasons]
    return Left(path, to_disk.merge(merged, path), warnings, is_whole=True)


@dataclass(frozen=True)
class _ToDisk:
    """Writes what an engine has trained."""

    run: Ready
    engine: Engine
    ranks: Ranks
    log: RunLog

    def finished(self, export: Export) -> Export:
        """The export of what is trained, with what was chosen on the way, and with a record of its frozen base."""
        adapters, plan = self.run.plan.spec.adapters, self.engine.plan
        export = adapters.exported(export, plan.tracked, self.engine)
        if not adapters.freezes:
            return export
        base = AdapterBase(self.run.base or weights_of(self.run.source, plan.spec.seed), plan.held_base)
        return replace(export, beside={BASE: base.to_json()})

    def merge(self, exports: Sequence[Export], adapter: Path) -> Path | None:
        """Writes an adapter that is exported as one with its base, if that is wanted; else an older one goes."""
        for export in exports:
            about = {MERGED_RECORD: merged_record(self.run.source, [adapter])} if self.ranks.is_first else {}
            path = self.write(replace(export, beside=about), "Merging", {})
            held = self.run.plan.spec.adapters.base
            self.log.say(f"Merged into {f'the base in {held}' if held else 'the base'}: {path}", least=SUMMARY)
            return path
        old = adapter / MERGED
        if self.ranks.is_first and self.run.results.exports[0].overwrite and remove_model(old):
            self.log.say(f"Removed what an earlier run merged: {old}", least=SUMMARY)
        return None

    def write(self, what: Export, title: str, bad: dict[str, None]) -> Path:
        """The folder of an export, by the first rank, once it is complete; the other ranks read along.

        Rows that are not finite are added to `bad`, and raise NonFiniteError unless they are exported anyway.
        """
        done = count(1)

        def read(row: Row) -> np.ndarray:
            values = self.engine.parameter(row.name)
            report(min(next(done), len(what.rows)), len(what.rows))
            if not all_finite(values):
                bad[row.name] = None
                if not self.run.results.exports_anyway:
                    raise NonFiniteError
            return values

        with self.ranks.long(title.lower()), self.log.task(title) as report:
            path = what.write(read) if self.ranks.is_first else what.read_along(read)
            self.ranks.agreed(None)  # what follows would wait for the first one without saying so
            return path


def _ruin(now: Progress, after: float | None) -> list[str]:
    """Why the model is ruined by the last step, if it is."""
    if now.rejected:
        return [f"the last step, {now.step}, changed nothing: it was not finite"]
    if now.evaluated == now.step and not math.isfinite(now.eval_loss):
        return [f"the loss of the last evaluation is {now.eval_loss}"]
    return [f"after the last step the loss of a batch is {after}"] if after and not math.isfinite(after) else []


def _not_finite(bad: Mapping[str, None]) -> str:
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"the weights of {next(iter(bad))}{more} are not all finite"


def _way_back(run: Ready, now: Progress) -> str:
    """How to continue after a run that was ruined."""
    others = run.results.checkpoints.others(now.step)
    again = f"resume from one of the checkpoints of {others} with --continue STEP" if others else "start again"
    return (
        f"Lower --learning-rate, or raise --warmup, and {again}. To get this model all the same, use --continue "
        "--export-anyway"
    )
