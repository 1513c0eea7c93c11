"""What an earlier run left, what of it a run continues or replaces, and how the run that continues it differs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmq.comm.environment import TRAIN
from llmq.data.batches.loader import Data
from llmq.disk import shown, storage
from llmq.files.checkpoint import Checkpoints, load
from llmq.files.huggingface import is_of_run, overwrites, refuse_taken
from llmq.options.parse import Options, changed
from llmq.training.log import RunLog
from llmq.training.ranks import Ranks


@dataclass(frozen=True)
class Past:
    """The run's checkpoints, and the one that it continues: its path and state, or None and {} from step 0.

    `starts_over` says that what an earlier run left is to go, `replaces_model` that a model in its place may.
    """

    checkpoints: Checkpoints
    path: Path | None
    state: Mapping[str, Any]
    starts_over: bool
    replaces_model: bool

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return int(self.state.get("step", 0))

    def refuse_earlier(self, options: Options) -> None:
        """UsageError or StorageError if this run would mix with what an earlier one left.

        It is raised where all that is given is known to be good: an advice to delete or resume is for a run that works.
        """
        if not self.starts_over:
            self.checkpoints.refuse_earlier()
        if not self.replaces_model:
            refuse_taken(options.export)


def open_past(options: Options, log: RunLog, ranks: Ranks, *, plans_only: bool) -> Past:
    """What the run continues. The first rank's choice is all ranks'."""
    checkpoints = Checkpoints(options.checkpoint)
    continues = options.to_flat()["continue"] is not None
    starts_over = not continues and (plans_only or overwrites(options.export))
    writes = ranks.is_first and not plans_only
    path = None if starts_over else checkpoints.start(log.warn, partial(log.task, words=shown), writes=writes)
    if "resume" in ranks.told:
        path = Path(ranks.told["resume"]) if ranks.told["resume"] else None
    state = load(path, verified=False)[0] if path else {}
    replaces_model = plans_only or is_of_run(options.export, state.get("options", {}))
    if checkpoints.starts_anew:
        log.warn(f"--continue auto found no checkpoint in {checkpoints.folder}: this run begins at step 0")
    return Past(checkpoints, path, state, starts_over, replaces_model)


def remove_earlier(past: Past, log: RunLog, ranks: Ranks, *, plans_only: bool) -> None:
    """Removes checkpoints and log of an earlier run that is to go; its model stays until the new one is complete."""
    if plans_only or not past.starts_over or not ranks.is_first:
        return
    there = past.checkpoints.clear()
    if log.path.is_file():
        there.append(log.path)
        with storage(log.path, "the log cannot be deleted"):
            log.path.unlink()
    if there:
        log.say(f"--overwrite: removed what an earlier run left: {', '.join(map(str, there))}")


def settings(options: Mapping[str, Any], data: Data, start: Sequence[str]) -> dict[str, Any]:
    """What a checkpoint says of the run that writes it, for `changes`; `start` is the command that started ranks."""
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
    """Flags with which a step has so many rows on these ranks: `--batch-size=2 --grad-accumulation=4 keep 8`."""
    fewest = 1 if options["adapters"] is None else data.batch_size  # of which each adapter has rows of its own
    sizes = (size for size in range(data.batch_size, fewest - 1, -1) if rows % (size * data.world) == 0)
    if (size := next(sizes, None)) is None:
        return f"no flags keep {rows} on {data.world} ranks"
    accumulated = f"--grad-accumulation={rows // (size * data.world)}"
    step = accumulated if options["global_batch_size"] is None else f"--global-batch-size={rows}"
    return f"--batch-size={size} {step} keep {rows}"
