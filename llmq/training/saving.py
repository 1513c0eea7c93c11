"""The checkpoints of a run: when one is due, what it holds, and the newest that is complete."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from llmq.disk import shown
from llmq.engine.engine import Engine
from llmq.files.checkpoint import EVAL_LOSS
from llmq.files.writers import Keep, Saver, Snapshot
from llmq.hardware import device
from llmq.training.identity import state_of
from llmq.training.progress import Progress
from llmq.training.ranks import Ranks
from llmq.training.ready import Ready

HOST_RESERVE = 0.05  # of the host's memory stays free when checkpoints are copied into it


class RunCheckpoints:
    """Begins checkpoints, which `saver` may write while training continues, and notes those that are complete."""

    def __init__(self, ready: Ready, ranks: Ranks, saver: Saver) -> None:
        self._checkpoints, self._ranks, self._saver = ready.results.checkpoints, ranks, saver
        self.path = ready.results.resume  # of the newest checkpoint that is complete
        self.step = 0  # its step
        self._begun = 0  # step of the newest save that was begun

    def resumed(self, step: int) -> None:
        """Notes the step of the checkpoint that the run continues."""
        self.step = self._begun = step

    def is_begun(self, step: int) -> bool:
        """Whether the checkpoint of a step is complete or under way."""
        return step in (self.step, self._begun)

    def is_asked(self) -> bool:
        """Whether the file that asks for a checkpoint is there, which the first of many ranks looks for."""
        return self._ranks.is_first and self._checkpoints.asked()

    def is_due(self, now: Progress, *, last: bool) -> bool:
        """Whether to save after this step: each n-th one, the last, and one that was evaluated as the best."""
        is_best = now.evaluated == now.step and self._checkpoints.improves(now.eval_loss)
        return self._checkpoints.due(now.step, last=last) or is_best

    @property
    def comes_before_evaluation(self) -> bool:
        """Whether the last step is saved before its evaluation, which may take long and decides nothing here."""
        return not self._checkpoints.saves_best

    def save(
        self, ready: Ready, engine: Engine, now: Progress, hooks: Mapping[str, Any], *, beside: bool = False
    ) -> None:
        """Begins a checkpoint of this step, with the state of `hooks`; earlier ones must be settled.

        With `beside`, or if the step was refused, all older ones stay.
        """
        state = {**now.stored, **hooks, **state_of(ready, self._ranks.start)}
        is_known = now.evaluated == now.step and math.isfinite(now.eval_loss)
        metrics = {EVAL_LOSS: now.eval_loss} if is_known else {}
        beside = beside or now.rejected > 0  # theirs may be the last sound weights
        snapshot = Snapshot(now.step, ready.checkpoint_slices, engine.state, state, metrics)
        self._saver.save(snapshot, Keep() if beside else self._checkpoints.keep)
        self._begun = now.step

    def settle(self, *, wait: bool) -> Path | None:
        """The checkpoint that was completed since the last call, if any. StorageError for one that failed."""
        begun, self._begun = self._begun, self.step  # one that failed is begun again if it is due
        with self._ranks.long("saving") if wait else nullcontext():
            path = self._saver.finished(wait=wait)
        if path is not None:
            self.path, self.step = path, begun
        self._begun = begun
        return path


def memory_aside(ready: Ready, say: Callable[[str], None]) -> Callable[[int], np.ndarray] | None:
    """What gives host memory for a copy of a checkpoint, which is written while training continues.

    None, having said so, where the host has too little for it.
    """
    homes = ("host", "device") if ready.device.kind == "cpu" else ("host",)  # what of the plan is in host memory
    needed = ready.checkpoint_copy_bytes + sum(sum(ready.plan.table(home).values()) for home in homes)
    total, free = device.memory_bytes()
    if needed + HOST_RESERVE * total <= free:
        return ready.backend.host_bytes
    say(
        f"Training waits while a checkpoint is written: to save beside it, the run needs {shown(needed)} of host "
        f"memory beyond {shown(int(HOST_RESERVE * total))} that stay free, and {shown(free)} are free"
    )
    return None
