"""How long a run is, and the learning rate of each of its updates: a plain function of the update's number.

With x updates made before this one (x = step - 1, steps counted from 1), S steps in all, W of warmup, D of cooldown,
and f the final fraction, the rate is peak * r(x). A schedule that --reset began at a step counts x and S from there.

    warmup      x < W        r = min(1, (x + 1) / W): the W-th update is the first at the peak, none is made at rate 0
    course      W <= x       p = (x - W) / (S - W) of the way
                             cosine           r = f + (1 - f) * (1 + cos(pi * p)) / 2
                             linear           r = 1 - (1 - f) * p
                             constant, wsd    r = 1
    cooldown    S - D <= x   a straight line from the course's value at x = S - D to f at x = S

r is continuous at both joints, and r(S) = f is where the run arrives: the last update is one step of the way before
it. Without a cooldown that is the usual cosine or linear decay; `wsd` (warmup, stable, decay: Hu et al., 2024) has its
decay in the cooldown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from llmq.errors import UsageError
from llmq.options.field import LARGEST_STEP

if TYPE_CHECKING:
    from llmq.options.maths import ScheduleOptions

LARGEST_RATE = 1.0  # prompts are trained at 0.3 (Lester et al., 2021), which is more than anything else


@dataclass(frozen=True)
class Schedule:
    """A run of `steps` updates, `start` of them before this schedule began.

    `peak` is the largest rate, `final` a fraction of it.
    """

    steps: int
    peak: float
    warmup: int = 0
    cooldown: int = 0
    final: float = 1.0
    shape: str = "constant"  # or cosine, linear, wsd
    start: int = 0

    def learning_rate(self, step: int) -> float:
        """Rate of update number `step`, from 1; after the last one, the final rate."""
        steps = self.steps - self.start
        x = min(step - 1 - self.start, steps)
        if x < self.warmup:
            return self.peak * (x + 1) / self.warmup
        falls = steps - self.cooldown
        if x <= falls:
            return self.peak * self._course(x, steps)
        level = self._course(falls, steps)
        return self.peak * (level + (self.final - level) * (x - falls) / self.cooldown)

    def warnings(self) -> Iterator[str]:
        """A message on a rate that trains nothing, or ruins any model."""
        rate = f"--learning-rate {self.peak:g}"
        if self.peak == 0:
            yield f"{rate} trains nothing: the weights do not change"
        elif self.peak > LARGEST_RATE:
            yield f"{rate} moves weights by up to that much in every step, and few are above 1: use 1e-2 or less"

    def _course(self, x: int, steps: int) -> float:
        p = (x - self.warmup) / (steps - self.warmup) if steps > self.warmup else 0.0
        if self.shape == "cosine":
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * p)) / 2
        return 1 - (1 - self.final) * p if self.shape == "linear" else 1.0


def make_schedule(options: ScheduleOptions, num_windows: int | None, windows_per_step: int, start: int = 0) -> Schedule:
    """The schedule of a run that began at step `start`: of --steps, or as many as cover --epochs passes over the
    windows of the training data, None where these are not known.

    UsageError if --epochs asks for them then, or for more steps than can be counted, or if warmup and cooldown do not
    fit.
    """
    if (steps := options.steps) is None:
        assert options.epochs is not None
        if num_windows is None:
            raise UsageError(f"--epochs {options.epochs:g} of a stream, whose length is not known: set --steps instead")
        # As written, not as the nearest binary fraction: 0.1 epochs of 1000 windows are 100 windows.
        windows = Fraction(repr(options.epochs)) * num_windows
        steps = max(math.ceil(windows / windows_per_step), 1)
        if steps > LARGEST_STEP:
            raise UsageError(
                f"--epochs {options.epochs:g} of {num_windows} sequences are {steps} steps, and the most are "
                f"{LARGEST_STEP}: use fewer"
            )
    own = max(steps - start, 0)
    problems = list(options.too_short(own)) if own else []
    if problems:
        raise UsageError(problems[0])
    return Schedule(
        steps=steps,
        peak=options.learning_rate,
        warmup=options.warmup_steps(own),
        cooldown=options.cooldown,
        final=options.final_lr_fraction,
        shape=options.lr_schedule,
        start=start,
    )
