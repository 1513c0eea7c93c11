"""What a checkpoint says of its run beside its progress, and how the run that continues it differs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from llmq.comm.environment import TRAIN
from llmq.data.batches.loader import Data
from llmq.files.checkpoint import check_same
from llmq.options.parse import changed
from llmq.training.ready import Ready


def state_of(run: Ready, start: Sequence[str]) -> dict[str, Any]:
    """What a checkpoint keeps of a run that `start` started, for the one that continues it."""
    dtypes = run.plan.spec.precision
    return {
        **settings(run.options, run.data, start),
        "must_match": must_match(run),
        "row_layout": run.data.layout.kind,
        "algorithms": run.backend.algorithms,
        "sites": {"matmul": dtypes.matmul, "wide": list(dtypes.wide)},
    }


def must_match(run: Ready) -> dict[str, Any]:
    """What a checkpoint has in common with the run that continues it: else it would be another run."""
    spec = run.plan.spec
    return {
        "seed": spec.seed,
        **run.data.identity(),
        "model": spec.config.identity(),
        "parameters": {row.name: list(row.shape) for row in run.plan.rows},
        **({"frozen model": run.base} if run.plan.loaded_anew else {}),
        **spec.adapters.must_match(),
        **spec.hyper.rule.identity(),
        **spec.precision.identity(),
    }


def check_continues(run: Ready, saved: Mapping[str, Any]) -> None:
    """UsageError naming what must match the checkpoint and does not; the data need not where it begins again."""
    now = must_match(run)
    if "data" in run.results.checkpoints.resets:
        now = {name: value for name, value in now.items() if name not in run.data.identity()}
        saved = {name: value for name, value in saved.items() if name in now}
    check_same(saved, now)


def settings(options: Mapping[str, Any], data: Data, start: Sequence[str]) -> dict[str, Any]:
    """What `changes` needs of the run that writes a checkpoint."""
    about = {"ranks": data.world, "start": list(start), "rows": data.samples_per_step}
    return {"options": dict(options), "ran_as": about}


def changes(saved: Mapping[str, Any], options: Mapping[str, Any], data: Data) -> list[str]:
    """How the run that continues a checkpoint differs: options, ranks and rows per step, with flags that keep these."""
    found = changed(saved["options"], options)
    before = saved.get("ran_as", {})  # earlier releases do not say it
    ranks, rows = before.get("ranks", data.world), before.get("rows", data.samples_per_step)
    if ranks != data.world:
        start = shlex.join(before["start"]).removesuffix(" --")
        alone = start if ranks == 1 else f"--gpus={ranks}"
        how = alone if tuple(before["start"]) == TRAIN else start
        found.append(f"ranks {ranks} to {data.world} ({how} keeps {ranks})")
    if rows != data.samples_per_step:
        found.append(f"rows per step {rows} to {data.samples_per_step} ({_keeping(rows, options, data)})")
    return found


def _keeping(rows: int, options: Mapping[str, Any], data: Data) -> str:
    """Flags with which a step has these many rows on these ranks: `--batch-size=2 --grad-accumulation=4 keep 8`."""
    sizes = (size for size in range(data.batch_size, 0, -1) if rows % (size * data.world) == 0)
    if (size := next(sizes, None)) is None:
        return f"no flags keep {rows} on {data.world} ranks"
    accumulated = f"--grad-accumulation={rows // (size * data.world)}"
    step = accumulated if options["global_batch_size"] is None else f"--global-batch-size={rows}"
    return f"--batch-size={size} {step} keep {rows}"
