"""What an earlier run left in this run's folders, and what of it this one continues or replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmq.disk import shown, storage
from llmq.files.checkpoint import Checkpoints, load
from llmq.files.huggingface import is_of_run, overwrites, refuse_taken
from llmq.files.manifest import Reader
from llmq.options.parse import Options
from llmq.training.log import RunLog
from llmq.training.progress import Progress
from llmq.training.ranks import Ranks


@dataclass(frozen=True)
class EarlierRun:
    """The run's checkpoints, and the one that it continues: its path, state and tensors; None and {} from step 0.

    `starts_over` says that what an earlier run left is to go, `replaces_model` that a model in its place may.
    """

    checkpoints: Checkpoints
    path: Path | None
    state: Mapping[str, Any]
    reader: Reader | None
    starts_over: bool
    replaces_model: bool

    @classmethod
    def open(cls, options: Options, log: RunLog, ranks: Ranks, *, plans_only: bool) -> EarlierRun:
        """What the run continues. The first rank's choice is all ranks'."""
        checkpoints = Checkpoints(options.checkpoint)
        continues = options.to_flat()["continue"] is not None
        starts_over = not continues and (plans_only or overwrites(options.export))
        writes = ranks.is_first and not plans_only
        path = None if starts_over else checkpoints.start(log.warn, partial(log.task, words=shown), writes=writes)
        if "resume" in ranks.told:
            path = Path(ranks.told["resume"]) if ranks.told["resume"] else None
        state, reader = load(path, verified=False) if path else ({}, None)  # it was, when it was chosen
        replaces_model = plans_only or is_of_run(options.export, state.get("options", {}))
        if checkpoints.starts_anew:
            log.warn(f"--continue auto found no checkpoint in {checkpoints.folder}: this run begins at step 0")
        return cls(checkpoints, path, state, reader, starts_over, replaces_model)

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return int(self.state.get("step", 0))

    @property
    def progress(self) -> Progress:
        """How far the run is, with what --reset names begun again."""
        return Progress.read(self.state).reset(self.checkpoints.resets) if self.path else Progress()

    def refuse_to_mix(self, options: Options) -> None:
        """UsageError or StorageError if this run would mix with what an earlier one left.

        It is raised where all that is given is known to be good: an advice to delete or resume is for a run that works.
        """
        if not self.starts_over:
            self.checkpoints.refuse_earlier()
        if not self.replaces_model:
            refuse_taken(options.export)

    def remove(self, log: RunLog) -> None:
        """Removes checkpoints and log of a run that is to go; its model stays until the new one is complete."""
        if not self.starts_over:
            return
        there = self.checkpoints.clear()
        if log.path.is_file():
            there.append(log.path)
            with storage(log.path, "the log cannot be deleted"):
                log.path.unlink()
        if there:
            log.say(f"--overwrite: removed what an earlier run left: {', '.join(map(str, there))}")
