"""How far a run is: what its loop advances step by step, and a checkpoint stores whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmq.data.batches.batch import Batch
from llmq.engine.engine import StepResult
from llmq.training.health import Course
from llmq.training.records import to_json


@dataclass(frozen=True)
class Progress:
    """A run after `step` updates. Losses are nats per trained token.

    `rejected` are consecutive steps up to this one that changed nothing, as they were not finite; `losses` sum and
    number of the steps' losses since the newest evaluation. `stored` and `read` are the way to a checkpoint's state and
    back; the step is in the checkpoint's name.
    """

    rejected: int = 0
    losses: tuple[float, int] = (0.0, 0)
    train_loss: float = math.nan  # of this step
    eval_loss: float = math.nan  # of the newest evaluation
    step: int = 0
    position: int = 0  # samples taken
    stream: Mapping[str, int] | None = None  # of a stream: where the next sample begins
    course: Course = field(default_factory=Course)
    evaluated: int = 0  # step of the newest evaluation
    moments_from: int = 0  # step at which the optimizer's moments were zero
    rate_from: int = 0  # step at which the schedule began

    @property
    def mean_loss(self) -> float | None:
        """Mean of the steps' losses since the newest evaluation."""
        return self.losses[0] / self.losses[1] if self.losses[1] else None

    def reset(self, resets: Collection[str]) -> Progress:
        """With what --reset names begun at this step."""
        fresh: dict[str, Any] = {}
        if "optimizer" in resets:
            fresh |= {"moments_from": self.step}
        if "lr" in resets:
            fresh |= {"rate_from": self.step}
        if "data" in resets:
            fresh |= {"position": 0, "stream": None}
        return replace(self, **fresh)

    def after(self, batch: Batch, done: StepResult) -> Progress:
        """After the update that ends with a batch."""
        return replace(
            self,
            rejected=0 if done.applied else self.rejected + 1,
            losses=(self.losses[0] + done.loss, self.losses[1] + 1),
            train_loss=done.loss,
            step=self.step + 1,
            position=batch.position,
            stream=batch.stream,
            course=self.course.after(done.loss, done.norm),
        )

    def after_evaluation(self, loss: float) -> Progress:
        """After an evaluation at this step."""
        return replace(self, losses=(0.0, 0), eval_loss=loss, evaluated=self.step)

    @property
    def stored(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "position": self.position,
            "stream": self.stream,
            "rejected": self.rejected,
            "course": self.course.state,
            "evaluated": self.evaluated,
            "losses": to_json(self.losses),
            "train_loss": to_json(self.train_loss),
            "eval_loss": to_json(self.eval_loss),
            "moments_from": self.moments_from,
            "rate_from": self.rate_from,
        }

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Progress:
        """From the state of a checkpoint; earlier releases had no streams, course, resets and refused steps."""
        total, count = state["losses"]
        return cls(
            step=state["step"],
            position=state["position"],
            stream=state.get("stream"),
            rejected=state.get("rejected", 0),
            course=Course.read(state["course"]) if "course" in state else Course(),
            evaluated=state["evaluated"],
            losses=(float(total), count),
            train_loss=float(state["train_loss"]),
            eval_loss=float(state["eval_loss"]),
            moments_from=state.get("moments_from", 0),
            rate_from=state.get("rate_from", 0),
        )
