"""SGD with momentum, as torch.optim.SGD has it without dampening: weight decay is part of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmq.optimizers.rule import MASTER, State, StateKind
from llmq.tensor import Ref

MOMENTUM = StateKind("m", "Momentum")


@dataclass(frozen=True)
class Sgd:
    """Its constants, as in the op `sgd`. Without momentum there is no state but the masters."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Sgd:
        """With the values of its options."""
        return cls(options["momentum"], options["nesterov"], options["weight_decay"])

    def identity(self) -> dict[str, Any]:
        """A run resumes with momentum or without, as it began."""
        return {"--optimizer": "sgd with momentum" if self.momentum else "sgd without momentum"}

    @property
    def states(self) -> tuple[StateKind, ...]:
        """The sum of past gradients, if there is momentum."""
        return (MOMENTUM,) if self.momentum else ()

    def update(self, ops: Any, state: State, weight: Ref | None, grad: Ref, step: tuple[Ref, ...], **row: Any) -> None:
        """One call of `sgd`."""
        held = state[MASTER], state.get(MOMENTUM.name)
        ops.sgd(*held, weight, *held, grad, *step, momentum=self.momentum, nesterov=self.nesterov, **row)
