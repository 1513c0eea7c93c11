"""What a finished run leaves: its model, or its adapter and with --merge the model with it, unless they are ruined."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

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
from llmq.training.log import SUMMARY
from llmq.training.progress import Progress
from llmq.training.ready import Ready


def export_all(run: Ready, engine: Engine, now: Progress, batch: Batch) -> dict[str, Any]:
    """Writes the model or the adapter, unless it is ruined; what the run's result has of that, with warnings.

    A ruined one is written with --export-anyway. Weights are checked on their way to the disk, and the last update by
    what the loss of a `batch` is now.
    """
    loss = mean_loss(engine, batch, run.ranks.world)
    warnings = now.course.warnings(run.plan.spec.config.vocab_size, loss)
    to_disk, (export, *merged) = _ToDisk(run, engine), run.exports
    reasons, bad, path = _ruin(now, loss), dict[str, None](), None
    if not reasons or to_disk.anyway:
        with suppress(NonFiniteError):
            path = to_disk.write(to_disk.finished(export), "Exporting", bad)
            run.log.say(f"Exported: {path}", least=SUMMARY)
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        reasons.append(f"the weights of {next(iter(bad))}{more} are not all finite")
    if path is None:
        others = run.earlier.checkpoints.others(now.step)
        again = f"resume from one of the checkpoints of {others} with --continue STEP" if others else "start again"
        warnings.append(
            f"No model is exported: {reasons[0]}. Lower --learning-rate, or raise --warmup, and {again}. To get this "
            "model all the same, use --continue --export-anyway"
        )
        return {"exit_code": NonFiniteError.exit_code, "warnings": tuple(warnings)}
    warnings += [f"The model is exported although {why}" for why in reasons]
    return {"model_path": path, "merged_path": to_disk.merge(merged, path), "warnings": tuple(warnings)}


@dataclass(frozen=True)
class _ToDisk:
    """Writes what an engine has trained."""

    run: Ready
    engine: Engine

    @property
    def anyway(self) -> bool:
        """Whether a ruined model is exported, too."""
        return bool(self.run.options["export_anyway"])

    def finished(self, export: Export) -> Export:
        """The export of what is trained, with what was chosen on the way, and with a record of its frozen base."""
        plan = self.engine.plan
        export = plan.tracked.exported(export, self.engine)
        if not plan.spec.freezes:
            return export
        base = AdapterBase(self.run.base or weights_of(self.run.source, plan.spec.seed), plan.held_base)
        return replace(export, beside={BASE: base.to_json()})

    def merge(self, exports: Sequence[Export], adapter: Path) -> Path | None:
        """Writes an adapter that is exported as one with its base, if that is wanted; else an older one goes."""
        for export in exports:
            about = {MERGED_RECORD: merged_record(self.run.source, [adapter])} if self.run.ranks.is_first else {}
            path = self.write(replace(export, beside=about), "Merging", {})
            held = self.run.plan.spec.base
            self.run.log.say(f"Merged into {f'the base in {held}' if held else 'the base'}: {path}", least=SUMMARY)
            return path
        old = adapter / MERGED
        if self.run.ranks.is_first and self.run.exports[0].overwrite and remove_model(old):
            self.run.log.say(f"Removed what an earlier run merged: {old}", least=SUMMARY)
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
                if not self.anyway:
                    raise NonFiniteError
            return values

        with self.run.ranks.long(title.lower()), self.run.log.task(title) as report:
            path = what.write(read) if self.run.ranks.is_first else what.read_along(read)
            self.run.ranks.agreed(None)  # what follows would wait for the first one without saying so
            return path


def _ruin(now: Progress, after: float | None) -> list[str]:
    """Why the model is ruined by the last step, if it is."""
    if now.rejected:
        return [f"the last step, {now.step}, changed nothing: it was not finite"]
    if now.evaluated == now.step and not math.isfinite(now.eval_loss):
        return [f"the loss of the last evaluation is {now.eval_loss}"]
    return [f"after the last step the loss of a batch is {after}"] if after and not math.isfinite(after) else []


def all_finite(values: np.ndarray) -> bool:
    """Whether no element is infinite or NaN; of any float dtype.

    A bfloat16 is the upper half of an f32, whose exponent of all ones marks both: read off the bits, this is 6 times
    as fast as ml_dtypes' isfinite: 1.7 s for 7.6 billion on one core.
    """
    flat = values.reshape(-1)
    for start in range(0, flat.size, 1 << 20):  # stays in the cache
        part = flat[start : start + (1 << 20)]
        if part.dtype.name == "bfloat16":
            if ((part.view(np.uint16) & 0x7F80) == 0x7F80).any():
                return False
        elif not np.isfinite(part).all():
            return False
    return True
