"""What a method keeps of trained rows beside the optimizer's states, and what it does with that around a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from llmq.ops.record import Recorder
from llmq.row import Row
from llmq.stores.replicated import StatePiece
from llmq.tensor import Ref

# States of a piece of a row <- its value after the update and its gradient: ops, row, piece, gradient, scale, apply.
Track = Callable[[Any, Row, StatePiece, Ref, Ref, Ref], None]


class Programs(Protocol):
    """What is asked of the engine that runs the plan."""

    def run(self, name: str) -> None:
        """Runs a program."""

    def change(self, name: str) -> None:
        """Runs a program that changes weights."""

    def read(self, ref: Ref) -> np.ndarray:
        """A copy of a tensor."""

    def write(self, ref: Ref, values: np.ndarray) -> None:
        """Sets a tensor."""


class Tracked:
    """What most methods keep: nothing."""

    titles: Mapping[str, str] = {}  # of the states' spaces in the allocator table
    refs: Mapping[str, Sequence[Ref]] = {}  # states by the names of their rows
    cells: Mapping[str, Ref] = {}
    first: Mapping[str, float] = {}  # what each cell is filled with before the first step
    saved: Sequence[str] = ()  # cells that a checkpoint holds
    updates: Sequence[Track] = ()  # called with each piece of a row after its update

    def programs(self, weights: Any, moments: Any) -> dict[str, Callable[[Recorder], None]]:
        """What records the programs that are run between steps, by name."""
        return {}

    def before_step(self, engine: Programs, step: int) -> None:
        """Called before the micro-steps of a step, from 1."""

    def after_update(self, engine: Programs, step: int) -> str | None:
        """Called after the update of a step, which it may change; returns a line for the log."""
        return None
