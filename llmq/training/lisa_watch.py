"""A hook of the training loop for --lisa: other layers train from here on, under a plan of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from llmq.training.hooks import Loop


class LisaWatch:
    """Draws the layers of each period."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def before_step(self) -> None:
        """Where a period begins, moves the weights to an engine that trains its layers, with moments at zero.

        Weights that freeze are rounded to the model's dtype, in which they are held.
        """
        loop, step = self._loop, self._loop.progress.step + 1
        lisa = loop.job.plan.spec.lisa
        if lisa is None or not lisa.begins(step):
            return
        config = loop.job.plan.spec.config
        layers, frozen = lisa.active(config, step), lisa.frozen(config, step)
        loop.progress = replace(loop.progress, moments_from=step - 1)
        if step > 1:
            with loop.ranks.long("changing layers"):
                self._move(frozen)
        last = min(step + lisa.interval - 1, loop.job.schedule.steps)
        text = f"Layers {', '.join(map(str, layers))} train in steps {step} to {last}"
        loop.log.notice(text, layers=list(layers))

    def _move(self, frozen: frozenset[str]) -> None:
        loop, old = self._loop, self._loop.job.plan
        plan = loop.job.replan(old.spec.precision, old.total_bytes, frozen)
        values: Mapping[str, np.ndarray] = {row.name: loop.engine.parameter(row.name) for row in old.rows}
        loop.reopen(plan)
        loop.is_cold = True
        loop.engine.load((row, values[row.name]) for row in plan.rows)
