"""Which ranks AdaLoRA keeps (Zhang et al., 2023), as in PEFT's AdaLoraConfig: the schedule, and the choice by scores.

All adapters begin with one rank. After the warmup a number of triplets (an entry of E, a row of A, a column of B) that
falls with a cubic is kept, those that score highest over all maps. The E of others is set to 0; it may grow again until
the final steps, in which it is held at 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llmq.errors import UsageError


@dataclass(frozen=True)
class Budget:
    """The schedule of ranks; steps count from 1.

    `target_rank` is that of the adapters at last, on average (PEFT: target_r). Ranks stay as they are for `warmup`
    steps (tinit) and in the `final` ones (tfinal) of `total` (total_step), and are chosen anew every `interval` steps
    in between (deltaT) and at the end of that. `orth_reg` is the weight of the regulariser (orth_reg_weight). One that
    is `spent` is that of an adapter that was read, whose ranks stay.
    """

    target_rank: int
    warmup: int = 0
    final: int = 0
    interval: int = 10
    beta_1: float = 0.85
    beta_2: float = 0.85
    orth_reg: float = 0.5
    total: int = 0
    spent: bool = False

    def check(self, rank: int) -> None:
        """UsageError for a schedule that has no time, or nothing, to choose from."""
        if self.target_rank >= rank:
            raise UsageError(
                f"--adalora-target-rank {self.target_rank} is not below --lora-rank {rank}, with which adapters begin"
            )
        if self.total and self.last <= max(self.warmup, 1):
            raise UsageError(
                f"--adalora-warmup {self.warmup} and --adalora-final {self.final} leave none of {self.total} steps in "
                "which ranks are chosen, after at least one whose gradients say how: use fewer, or more --steps"
            )

    @property
    def last(self) -> int:
        """The step after which ranks are chosen for the last time."""
        return self.total - self.final

    def chooses(self, step: int) -> bool:
        """Whether ranks are chosen after a step."""
        return step == self.last or (self.warmup < step < self.last and step % self.interval == 0)

    def holds(self, step: int) -> bool:
        """Whether what was left out is held at 0."""
        return step > self.last

    def count(self, step: int, triplets: int, adapters: int) -> int:
        """Triplets that are kept after a step, of so many that so many adapters begin with."""
        target, rest = self.target_rank * adapters, 1 - (step - self.warmup) / (self.last - self.warmup)
        return int((triplets - target) * rest**3 + target)

    def identity(self) -> dict[str, Any]:
        """What makes the run compute what it computes."""
        return asdict(self)


def kept(scores: np.ndarray, count: int) -> np.ndarray:
    """Which of all triplets score above the one that is the first to be left out, so that `count` or fewer are kept."""
    left_out = len(scores) - count
    return scores > np.partition(scores, left_out - 1)[left_out - 1]
