"""How far a run is: what its loop advances step by step, and a checkpoint stores whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from llmq.data.batches.batch import Batch
from llmq.engine.engine import GroupResult, Rates, StepResult
from llmq.training.health import Course
from llmq.training.records import to_json

Own = TypeVar("Own", bound="GroupProgress")


@dataclass(frozen=True)
class GroupProgress:
    """How a group of rows trains, such as one of several adapters: consecutive steps up to this one that changed
    nothing, as they were not finite, sum and number of the steps' losses since the newest evaluation, the loss of this
    step, and that of the evaluation, if there was one. Losses are nats per trained token."""

    rejected: int = 0
    losses: tuple[float, int] = (0.0, 0)
    train_loss: float = math.nan
    eval_loss: float | None = None

    def stepped(self: Own, loss: float, *, applied: bool, **more: Any) -> Own:
        """After one more step."""
        losses = (self.losses[0] + loss, self.losses[1] + 1)
        rejected = 0 if applied else self.rejected + 1
        return replace(self, rejected=rejected, losses=losses, train_loss=loss, **more)

    def evaluated_as(self: Own, loss: float, **more: Any) -> Own:
        """After an evaluation."""
        return replace(self, losses=(0.0, 0), eval_loss=loss, **more)

    @property
    def mean_loss(self) -> float | None:
        """Mean of the steps' losses since the newest evaluation."""
        return self.losses[0] / self.losses[1] if self.losses[1] else None


@dataclass(frozen=True)
class Progress(GroupProgress):
    """A run after `step` updates, with those groups of rows that have names.

    `stored` and `read` are the way to a checkpoint's state and back; the step is in the checkpoint's name.
    """

    eval_loss: float = math.nan
    step: int = 0
    position: int = 0  # samples taken
    stream: Mapping[str, int] | None = None  # of a stream: where the next sample begins
    course: Course = field(default_factory=Course)
    evaluated: int = 0  # step of the newest evaluation
    moments_from: int = 0  # step at which the optimizer's moments were zero
    rate_from: int = 0  # step at which the schedule began
    groups: Mapping[str, GroupProgress] = field(default_factory=dict)

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

    def group(self, name: str) -> GroupProgress:
        """That of a group of rows, which may not have begun."""
        return self.groups.get(name, GroupProgress())

    def after(self, batch: Batch, done: StepResult) -> Progress:
        """After the update that ends with a batch."""
        named = (one for one in done.groups if one.name)
        return self.stepped(
            done.loss,
            applied=done.applied,
            step=self.step + 1,
            position=batch.position,
            stream=batch.stream,
            course=self.course.after(done.loss, done.norm),
            groups={one.name: self.group(one.name).stepped(one.loss, applied=one.applied) for one in named},
        )

    def after_evaluation(self, loss: float, groups: Mapping[str, float]) -> Progress:
        """After an evaluation at this step: the loss of all, and of those groups that have held-out data."""
        found = {name: self.group(name).evaluated_as(own) for name, own in groups.items()}
        return self.evaluated_as(loss, evaluated=self.step, groups={**self.groups, **found})

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
            **({"adapters": {name: to_json(asdict(one)) for name, one in self.groups.items()}} if self.groups else {}),
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
            groups={name: _group(one) for name, one in state.get("adapters", {}).items()},
        )


def of_groups(groups: Sequence[GroupResult], rates: Rates) -> dict[str, dict[str, Any]] | None:
    """What a step's record has of each group of rows that has a name, with its rate; None where there is none."""
    each = rates if isinstance(rates, Sequence) else [rates] * len(groups)
    found = {}
    for one, rate in zip(groups, each, strict=True):
        numbers = {"loss": one.loss, "norm": one.norm, "lr": rate, "trained_tokens": one.num_tokens}
        found[one.name] = {**numbers, "applied": one.applied}
    found.pop("", None)
    return found or None


def _group(state: Mapping[str, Any]) -> GroupProgress:
    total, count = state["losses"]
    held_out = state["eval_loss"]
    last = (float(state["train_loss"]), None if held_out is None else float(held_out))
    return GroupProgress(state["rejected"], (float(total), count), *last)
