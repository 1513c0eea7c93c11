"""The groups of rows that are updated by a norm and a rate of their own: all, or those of each of several adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmq.model.optimizer import RowGroup
from llmq.ops.record import Recorder
from llmq.plan.spec import Spec
from llmq.row import Row
from llmq.stores.activations import Frame
from llmq.stores.ranks import Alone, ManyRanks
from llmq.stores.sharding import Shards
from llmq.tensor import Ref, num_norm_tiles

OF_GROUP = ("norm", "last_norm", "grad_scale", "apply", "learning_rate")


@dataclass(frozen=True)
class Groups:
    """All groups by name, one without a name if there is one alone; `sums` and `evaluated` are the sums of loss and
    tokens of training and of evaluation, by the same names."""

    by_name: dict[str, RowGroup]
    sums: dict[str, dict[str, Ref]]
    evaluated: dict[str, dict[str, Ref]]

    def frame(self, of: dict[str, dict[str, Ref]]) -> Frame:
        """Sums as the head finds them: `total.loss` of one group, `total[NAME].loss` of several."""
        return Frame(of[""] if "" in of else {name: Frame(sums) for name, sums in of.items()})

    def handles(self) -> tuple[Frame, ...]:
        """What the engine reads and writes of each group, in order."""
        found = []
        for name, group in self.by_name.items():
            agreed = Frame(group.ranks.cells(group.cells))
            about = {"agreed": agreed, "evaluated": Frame(self.evaluated[name])}
            found.append(Frame({**group.cells, **about, "clips_by_last": group.hyper.clips_by_last, "name": name}))
        return tuple(found)


def groups_of(spec: Spec, rows: Sequence[Row], grads: Any, shards: Shards | None) -> Groups:
    """The groups of a run whose gradients are in the store `grads`, and the rows of many ranks in `shards`."""
    stat = spec.precision.stat
    by_name: dict[str, RowGroup] = {}
    sums, evaluated = dict[str, dict[str, Ref]](), dict[str, dict[str, Ref]]()
    for name, hyper, seed, only in spec.adapters.groups(spec.hyper, spec.seed, rows):
        # One group has no name, so its cells are called the same as in a run without adapters, and in its checkpoints.
        before = f"{name}/" if name else ""
        # As many partial sums as this rank adds to: a store's shares say which rows these are.
        count = sum(num_norm_tiles(grad.shape) for grad in grads.shares(Recorder(), only))
        sums[name] = _sums(before, stat)
        evaluated[name] = _sums(f"evaluate.{before}", stat)
        cells = {key: Ref(f"{before}{key}", "cell", (1,), stat) for key in OF_GROUP}
        cells["partials"] = Ref(f"{before}partials", "cell", (count, 1), stat)
        ranks = Alone() if shards is None else ManyRanks(shards.tiles(only))
        by_name[name] = RowGroup({**cells, **sums[name]}, hyper, seed, ranks, only)
    return Groups(by_name, sums, evaluated)


def _sums(before: str, stat: str) -> dict[str, Ref]:
    kinds = {"loss": stat, "tokens": "int32"}
    return {key: Ref(f"{before}{key}", "sum", (1,), dtype) for key, dtype in kinds.items()}
