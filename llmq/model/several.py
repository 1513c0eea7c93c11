"""Several LoRA adapters that are trained at once on one frozen model, each on rows of every micro-batch.

As in multi-LoRA training (mLoRA; Ye et al., 2023), the model's own products are shared and an adapter's are of its
rows: what is computed of a row is what a run of its adapter alone would compute. Loss, norm, clipping, rate and update
are each adapter's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from llmq.model.adapters import FILE, Adapters
from llmq.model.optimizer import Hyperparameters
from llmq.row import Row


@dataclass(frozen=True)
class Member:
    """One of several adapters: its name, what it is, how many rows of a micro-batch are its own, the seed of its random
    bits, and the constants of its optimizer."""

    name: str
    adapters: Adapters
    rows: int
    seed: int = 0
    hyper: Hyperparameters = field(default_factory=Hyperparameters)


@dataclass(frozen=True)
class Several(Adapters):
    """Several adapters on one base. Their rows follow each other in a micro-batch, in the order of `members`."""

    members: tuple[Member, ...] = ()

    @classmethod
    def of(cls, members: Sequence[Member], base: str | None) -> Several:
        """These adapters on a base that is held in a dtype, or the model's (None)."""
        every = tuple(target for member in members for target in member.adapters.targets)
        largest = max(member.adapters.rank for member in members)
        return cls(largest, 0.0, every, base=base, members=tuple(members))

    @property
    def batch_size(self) -> int:
        """Rows of a micro-batch."""
        return sum(member.rows for member in self.members)

    @property
    def places(self) -> Iterator[tuple[Member, int, int]]:
        """Each with its rows [start, stop) of a micro-batch."""
        start = 0
        for member in self.members:
            yield member, start, start + member.rows
            start += member.rows

    @cached_property
    def by_name(self) -> dict[str, Member]:
        """The members by their names."""
        return {member.name: member for member in self.members}

    @property
    def added_weights(self) -> float:
        """Weights of adapters that a token passes, on average."""
        return sum(member.rows * member.adapters.added_weights for member in self.members) / self.batch_size

    def identity(self) -> dict[str, Any]:
        """What makes the run compute what it computes."""
        return {
            member.name: {**member.adapters.identity(), "rows": member.rows, "seed": member.seed, "base": self.base}
            for member in self.members
        }

    def without_dropout(self) -> Several:
        """The same as it is evaluated."""
        quiet = (replace(member, adapters=member.adapters.without_dropout()) for member in self.members)
        return replace(self, members=tuple(quiet))

    def trains(self, row: Row) -> bool:
        """Whether a parameter is trained: those of adapters alone."""
        return row.file == FILE

    def rate_of(self, row: Row) -> float:
        """What multiplies the learning rate of a parameter."""
        return 1.0 if row.adapter is None else self.by_name[row.adapter].adapters.rate_of(row)

    def with_one_row_each(self) -> Several:
        """The same in the smallest micro-batch."""
        return replace(self, members=tuple(replace(member, rows=1) for member in self.members))


def alike(adapters: Adapters, count: int, batch_size: int) -> Several:
    """So many equal adapters, which share the rows of a micro-batch; it must have a multiple of them."""
    assert batch_size % count == 0, f"{batch_size} rows for {count} adapters"
    members = (Member(f"adapter-{n + 1}", replace(adapters, base=None), batch_size // count, n) for n in range(count))
    return Several.of(tuple(members), adapters.base)
