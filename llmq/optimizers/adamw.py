"""AdamW (Loshchilov and Hutter, 2019): two moments of the gradient, and weight decay that they do not see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmq.optimizers.rule import State, StateKind
from llmq.tensor import Ref

M, V = StateKind("m", "Adam M"), StateKind("v", "Adam V", is_root=True)


@dataclass(frozen=True)
class AdamW:
    """Its constants, as in the op `adamw`."""

    beta_1: float = 0.9
    beta_2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> AdamW:
        """With the values of its options."""
        return cls(options["beta_1"], options["beta_2"], options["adam_epsilon"], options["weight_decay"])

    def identity(self) -> dict[str, Any]:
        """Nothing: it is the optimizer of checkpoints that name none."""
        return {}

    @property
    def states(self) -> tuple[StateKind, ...]:
        """Both moments."""
        return M, V

    def update(self, ops: Any, state: State, weight: Ref | None, grad: Ref, step: tuple[Ref, ...], **row: Any) -> None:
        """One call of `adamw`."""
        betas = {"beta_1": self.beta_1, "beta_2": self.beta_2}
        held = tuple(state.values())
        ops.adamw(*held, weight, *held, grad, *step, **betas, epsilon=self.epsilon, **row)


DEFAULT = AdamW()
