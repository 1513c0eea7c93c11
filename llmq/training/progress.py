"""How far a run is: what its loop advances step by step, and a checkpoint stores whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from llmq.training.health import Course
from llmq.training.records import to_json


@dataclass(frozen=True)
class MemberProgress:
    """One of several adapters: consecutive refused steps up to this one, sum and number of the steps' losses since the
    newest evaluation, the loss of this step, and that of the evaluation."""

    rejected: int = 0
    losses: tuple[float, int] = (0.0, 0)
    train_loss: float = math.nan
    eval_loss: float | None = None  # of one without held-out data

    def after(self, loss: float, *, applied: bool) -> MemberProgress:
        """After one more step."""
        total, count = self.losses
        return replace(
            self,
            rejected=0 if applied else self.rejected + 1,
            losses=(total + loss, count + 1),
            train_loss=loss,
        )

    def evaluated(self, loss: float) -> MemberProgress:
        """After an evaluation."""
        return replace(self, losses=(0.0, 0), eval_loss=loss)

    @property
    def mean_loss(self) -> float | None:
        """Mean of the steps' losses since the newest evaluation."""
        return self.losses[0] / self.losses[1] if self.losses[1] else None


@dataclass(frozen=True)
class Progress:
    """A run after `step` updates. Losses are nats per trained token.

    `stored` and `read` are the way to a checkpoint's state and back; the step is in the checkpoint's name.
    """

    step: int = 0
    position: int = 0  # samples taken
    stream: Mapping[str, int] | None = None  # of a stream: where the next sample begins
    rejected: int = 0  # consecutive steps up to this one that changed nothing: they were not finite
    course: Course = field(default_factory=Course)
    evaluated: int = 0  # step of the newest evaluation
    losses: tuple[float, int] = (0.0, 0)  # sum and number of the steps' losses since then
    train_loss: float = math.nan  # of this step
    eval_loss: float = math.nan  # of the newest evaluation
    moments_from: int = 0  # step at which the optimizer's moments were zero
    rate_from: int = 0  # step at which the schedule began
    low: Mapping[str, int] = field(default_factory=dict)  # site: low fp8 readings in a row
    fell_back: tuple[str, ...] = ()  # sites that left fp8 in this run
    each: Mapping[str, MemberProgress] = field(default_factory=dict)  # of several adapters

    def anew(self, resets: Collection[str]) -> Progress:
        """With what --reset names begun at this step."""
        fresh: dict[str, Any] = {}
        if "optimizer" in resets:
            fresh |= {"moments_from": self.step}
        if "lr" in resets:
            fresh |= {"rate_from": self.step}
        if "data" in resets:
            fresh |= {"position": 0, "stream": None}
        return replace(self, **fresh)

    @property
    def stored(self) -> dict[str, Any]:
        """As JSON knows it."""
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
            "fp8": {"low": dict(self.low), "fell_back": list(self.fell_back)},
            **({"adapters": {name: to_json(asdict(one)) for name, one in self.each.items()}} if self.each else {}),
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
            low=state["fp8"]["low"],
            fell_back=tuple(state["fp8"]["fell_back"]),
            each={name: _member(one) for name, one in state.get("adapters", {}).items()},
        )


def _member(state: Mapping[str, Any]) -> MemberProgress:
    total, count = state["losses"]
    held_out = state["eval_loss"]
    last = (float(state["train_loss"]), None if held_out is None else float(held_out))
    return MemberProgress(state["rejected"], (float(total), count), *last)
