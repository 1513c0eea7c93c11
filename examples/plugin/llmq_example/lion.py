"""Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): the sign of an average of gradients.

Its op has no kernel for the GPU: `llmq.register("kernel", "lion", launch)` would add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import llmq
from llmq.operands import Output, Tensor, slices
from llmq.ops.reference.optimizer import rule, write, write_master
from llmq.ops.reference.random import M
from llmq.optimizers.rule import State, StateKind
from llmq.tensor import Ref


@rule(held={"new_master", "new_m"})
def lion(
    new_master: Output,
    new_m: Output,
    weight: Output,
    /,
    master: Tensor,
    m: Tensor,
    grad: Tensor,
    scale: Tensor,
    apply: Tensor,
    learning_rate: Tensor,
    step: Tensor,
    *,
    beta_1: float,
    beta_2: float,
    weight_decay: float,
    seed: int,
    stream: int,
    first: int = 0,
    rate: float = 1.0,
) -> None:
    """new_master, new_m, weight <- master, m, grad (one shape); the other four are (1,).

    With g = grad * scale and lr = learning_rate * rate: master -= lr (sign(beta_1 m + (1 - beta_1) g) + weight_decay
    master), m = beta_2 m + (1 - beta_2) g. Storage and rounding are as of the op `sgd`.
    """
    if apply.read()[0] == 0:
        return
    lr = float(learning_rate.read()[0]) * rate
    for start, rows in slices(master.shape):
        address = (seed, int(step.read()[0]), stream, first + start * master.shape[-1])
        value, past = master.chunk(start, rows).read(), m.chunk(start, rows).read()
        g = grad.chunk(start, rows).read() * scale.read()
        update = np.sign(beta_1 * past + (1 - beta_1) * g) + weight_decay * value
        write(new_m.chunk(start, rows), beta_2 * past + (1 - beta_2) * g, M, *address)
        write_master(new_master, weight, master, value - lr * update, (start, rows), *address)


llmq.register("op", "lion", lion)


@dataclass(frozen=True)
class Lion:
    """Its constants, as in the op."""

    beta_1: float
    beta_2: float
    weight_decay: float

    @classmethod
    def of(cls, options: Mapping[str, Any], *, beta_1: float = 0.9, beta_2: float = 0.99) -> Lion:
        """With llmq's option for the weight decay, and its own."""
        return cls(beta_1, beta_2, options["weight_decay"])

    def identity(self) -> dict[str, Any]:
        """Nothing beside its name, which every checkpoint has: constants may change."""
        return {}

    @property
    def states(self) -> tuple[StateKind, ...]:
        """The average, which has the options of Adam's first moment."""
        return (StateKind("m", "Lion M"),)

    def update(self, ops: Any, state: State, weight: Ref | None, grad: Ref, step: tuple[Ref, ...], **row: Any) -> None:
        """One call of `lion`."""
        held = tuple(state.values())
        ops.lion(*held, weight, *held, grad, *step, beta_1=self.beta_1, beta_2=self.beta_2, **row)
