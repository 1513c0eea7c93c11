"""Ranks that are chosen while adapters are trained (AdaLoRA), at the steps of their budget's schedule."""

from __future__ import annotations

from collections.abc import Callable

from llmq.adapters.adalora import choosing, kept
from llmq.adapters.importance import Importance
from llmq.adapters.peft_format import AdapterExport
from llmq.engine.engine import Engine
from llmq.files.huggingface import Export


class Allocation:
    """What a run whose ranks stay does: nothing."""

    def before(self, engine: Engine, step: int) -> None:
        """What is due before the micro-steps of a step."""

    def after(self, engine: Engine, step: int) -> None:
        """What is due after the update of a step."""

    def exported(self, engine: Engine, export: Export) -> Export:
        """The export with what has been chosen."""
        return export


class RankAllocation(Allocation):
    """Chooses ranks by importance."""

    def __init__(self, importance: Importance, say: Callable[[str], None]) -> None:
        self.importance, self.budget, self.say = importance, importance.budget, say

    def before(self, engine: Engine, step: int) -> None:
        """As in PEFT, the last step of the schedule does not count for its own choice."""
        if step == self.budget.last:
            engine.measure_importance()

    def after(self, engine: Engine, step: int) -> None:
        """Chooses what is kept, or holds what was left out at 0."""
        if self.budget.chooses(step):
            if step != self.budget.last:
                engine.measure_importance()
            importance = self.importance
            count = self.budget.count(step, importance.num_triplets, importance.num_adapters)
            flags = kept(importance.scores(engine.importance()), count)
            engine.keep(flags)
            ranks = [sum(pattern) for pattern in importance.patterns(flags).values()]
            self.say(
                f"Step {step}: {sum(ranks)} of {importance.num_triplets} singular values are kept, {min(ranks)} to "
                f"{max(ranks)} of a map"
            )
        if self.budget.chooses(step) or self.budget.holds(step):
            engine.mask()

    def exported(self, engine: Engine, export: Export) -> Export:
        """An adapter of what is kept, alone."""
        assert isinstance(export, AdapterExport)
        return choosing(export, self.importance.patterns(engine.kept()))


def allocation_of(engine: Engine, say: Callable[[str], None]) -> Allocation:
    """What chooses the ranks of an engine's plan, and says how many are kept."""
    importance = engine.plan.importance
    return RankAllocation(importance, say) if isinstance(importance, Importance) else Allocation()
