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

from llmq.adapters.lora import Lora
from llmq.adapters.method import Group, Method, SiteFacts
from llmq.adapters.targets import FILE, Target
from llmq.blocks.head import TotalsOfRows
from llmq.errors import UsageError
from llmq.model import optimizer
from llmq.model.optimizer import Hyperparameters
from llmq.options.sweep import MemberOptions
from llmq.row import Row
from llmq.sites.adapted import AdaptedLinear
from llmq.sites.linear import Linear
from llmq.sites.several import OwnRows, SeveralAdapters


@dataclass(frozen=True)
class Member:
    """One of several adapters: its name, what it is, how many rows of a micro-batch are its own, the seed of its random
    bits, and the constants of its optimizer."""

    name: str
    adapters: Lora
    rows: int
    seed: int = 0
    hyper: Hyperparameters = field(default_factory=Hyperparameters)


@dataclass(frozen=True)
class Several(Method):
    """Several adapters on one base. Their rows follow each other in a micro-batch, in the order of `members`."""

    members: tuple[Member, ...]

    @cached_property
    def targets(self) -> tuple[Target, ...]:  # type: ignore[override]
        """Those of all."""
        return tuple(target for member in self.members for target in member.adapters.targets)

    def around(self, base: Linear, at: SiteFacts) -> AdaptedLinear:
        """`base` with those adapters that have it among their targets, each on its rows."""
        found = [
            OwnRows(member.name, member.adapters.low_rank(base.name, replace(at, seed=member.seed)), start, stop)
            for member, start, stop in self.places
            if base.name in member.adapters.by_site
        ]
        return AdaptedLinear(base, SeveralAdapters(base.name, found, at.batch_size))

    def totals(self) -> TotalsOfRows:
        """Losses and tokens of each."""
        return TotalsOfRows({member.name: (start, stop) for member, start, stop in self.places})

    def groups(self, hyper: Hyperparameters, seed: int, rows: Sequence[Row]) -> Iterator[Group]:
        """The rows of each adapter, with its own constants and seed."""
        for member in self.members:
            own = frozenset(row.name for row in rows if row.adapter == member.name)
            yield member.name, member.hyper, member.seed, own

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
    def added_weights(self) -> float:  # type: ignore[override]
        """Weights of adapters that a token passes, on average."""
        return sum(member.rows * member.adapters.added_weights for member in self.members) / self.batch_size

    def identity(self) -> dict[str, Any]:
        """What makes the run compute what it computes."""
        return {
            member.name: {**member.adapters.identity(), "rows": member.rows, "seed": member.seed, "base": self.base}
            for member in self.members
        }

    def without_dropout(self) -> Several:
        """The same without dropout, as in evaluation."""
        quiet = (replace(member, adapters=member.adapters.without_dropout()) for member in self.members)
        return replace(self, members=tuple(quiet))

    def trains(self, row: Row) -> bool:
        """Whether a parameter is trained: those of adapters alone."""
        return row.file == FILE

    def rate_of(self, row: Row) -> float:
        """What multiplies the learning rate of a parameter."""
        return 1.0 if row.adapter is None else self.by_name[row.adapter].adapters.rate_of(row)

    def words(self) -> str:
        """How many there are."""
        return f"{len(self.members)} adapters at once"

    def facts(self) -> dict[str, Any]:
        """The largest rank."""
        return {**super().facts(), "lora_rank": max(member.adapters.rank for member in self.members)}

    def tile_problems(self) -> Iterator[str]:
        """A tile has tokens of all rows."""
        yield "--adapters gives each row of a batch its adapter, and a tile does not know its rows: use --seq-tiles 1"

    def fused_problems(self) -> Iterator[str]:
        """Each adapter waits for its norm."""
        yield "--adapters updates each adapter by a norm of its own: leave it out"

    def batch_problems(self, batch_size: int, noise: float) -> Iterator[str]:
        """Rows have owners, and noise has one address for all."""
        if self.batch_size != batch_size:
            yield f"--batch-size {batch_size}: the adapters of --adapters have {self.batch_size} rows: use as many"
        if noise:
            yield f"--neftune-alpha {noise:g} adds one noise to all rows of --adapters: leave it out"

    def with_one_row_each(self) -> Several:
        """The same in the smallest micro-batch."""
        return replace(self, members=tuple(replace(member, rows=1) for member in self.members))


def member_of(one: MemberOptions, found: Method) -> Member:
    """An adapter of --adapters. UsageError for what cannot share the base with others."""
    flat, why = one.options.to_flat(), _not_shared(found)
    if why is not None or not isinstance(found, Lora):
        raise UsageError(
            f"{one.name}: the adapter in {flat['adapter']} has {why}, which does not go with --adapters: train it alone"
        )
    hyper = optimizer.resolve(one.options.optimizer)
    return Member(one.name, replace(found, base=None), flat["batch_size"], flat["seed"], hyper)


def _not_shared(found: Method) -> str | None:
    """What an adapter has that others would see, or that llmq has of one adapter alone."""
    if type(found) is not Lora:
        return "another method than LoRA"
    if found.takes_out:
        return f"a base that {found.init} took it out of"
    if found.also or found.bias != "none":
        return "parameters of the model"
    return "magnitudes" if found.dora else None
