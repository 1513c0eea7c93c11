"""How fast a run is, and with that what it came to."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from llmq.training.hooks import Hook, RunView
from llmq.training.progress import Progress
from llmq.training.records import TrainRecord
from llmq.training.result import TrainResult


class Metrics(Hook):
    """The speed of each step of this run, in tokens per second, and how long the first one took."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._first_step_s = math.nan
        self.speeds: list[float] = []

    def after_step(self, run: RunView, record: TrainRecord) -> None:
        """Notes those of a step."""
        self.speeds.append(record.tps)
        if len(self.speeds) == 1:
            self._first_step_s = time.perf_counter() - self._began

    @property
    def seconds(self) -> float:
        """Since the run was called for."""
        return time.perf_counter() - self._began

    def result(self, now: Progress, light_s: float, **about: Any) -> TrainResult:
        """The run's metrics; the first step is left out of the speed where there are others.

        `light_s` are seconds for a token at the speed of light.
        """
        steady = self.speeds[1:] or self.speeds
        speed = float(np.median(steady)) if steady else math.nan
        return TrainResult(
            steps=now.step,
            train_loss=now.train_loss,
            eval_loss=now.eval_loss,
            tokens_per_second=speed,
            sol=light_s * speed if steady else None,
            first_step_s=self._first_step_s,
            **about,
        )
