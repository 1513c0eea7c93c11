"""Weights of many ranks, each of which updates its share of every row: gathered once in a step, or for each use."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from llmq.row import Row
from llmq.stores.sharding import Sharding, Shards, part_of
from llmq.stores.weights import ReplicatedWeights, fetched, weight_slot, written_here
from llmq.tensor import Ref


class GatheredWeights(ReplicatedWeights):
    """Weights that every rank holds whole. The update writes this rank's share of each, in the forms in which shares
    are those of the whole; all are gathered in the next forward pass, each part while the one before it computes.

    Rows that are `hosted` live on the host, and so do shares of them: what is gathered is a slot, which is used and
    sent there, and later walks fetch it.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        dtype: str,
        master_dtype: str | None,
        *,
        sharding: Sharding,
        hosted: Callable[[Row], bool] | None = None,
        host_master: str | None = None,
    ) -> None:
        # No weight is its own master here: the master is a share, and the weight is whole.
        super().__init__(rows, dtype, None, hosted=hosted)
        self._shards, self._gathers = Shards(rows, sharding.size, sharding.rank), False
        masters = {"device": master_dtype, "host": host_master}
        self._own = {
            row.name: self._shards.share(
                replace(whole, space="shard", value_in="master" if whole.dtype == masters[whole.home] else None)
            )
            for row in self._shards.rows
            for whole in [self.refs[row.name]]
        }

    @property
    def first(self) -> GatheredWeights:
        """The weights as the first micro-step of a step walks them, whose forward pass gathers them."""
        # A view of the same Refs: only the first micro-step of a step finds weights that the update has changed.
        found = copy(self)
        found._gathers = True
        return found

    def gather(self, ops: Any) -> None:
        """Makes all weights whole for what reads them before the next step does."""
        for part in dict.fromkeys(map(part_of, self._shards.rows)):
            self._make_whole(ops, part, "gather")

    def written(self, ops: Any, only: Container[str] | None = None) -> Iterator[Ref | None]:
        """Yields this rank's share of each trained row."""
        return written_here(ops, (ref for name, ref in self._own.items() if only is None or name in only))

    def _needed(self, parts: tuple[str | int, ...]) -> tuple[str | int, ...]:
        # Training's forward walk ends before the head, which backward uses first; only forward gathers.
        return parts if "head" in parts else (*parts, "head")  # which is used first on the way back

    def _fetch(self, ops: Any, part: str | int, phase: str) -> dict[str, Ref]:
        """Makes the rows of a part whole where they are; returns what is to be read in their place."""
        if self._gathers and phase == "forward":
            return self._make_whole(ops, part, phase)
        return super()._fetch(ops, part, phase)

    def _make_whole(self, ops: Any, part: str | int, phase: str) -> dict[str, Ref]:
        """Gathers the rows of a part; returns the slots of those that live on the host, and sends these there."""
        # Collectives need device memory: what lives on the host is gathered into a slot, used there and sent back.
        slots = {name: weight_slot(ref, phase) for name, ref in self._on_host(part).items()}
        rows = [row for row in self._shards.rows if part_of(row) == part]
        self._gather(ops, {row.name: slots.get(row.name, self.refs[row.name]) for row in rows}, phase)
        for name, slot in slots.items():
            ops.copy_to_host(self.refs[name], slot)
        return slots

    def _gather(self, ops: Any, whole: Mapping[str, Ref], phase: str) -> None:
        """Whole rows, by name, <- all ranks' shares. Collectives follow each other, after what comes from the host."""
        # All shares come before the first collective, as a backend may make collectives as one that follow each other.
        shares = {name: fetched(ops, self._own[name], f"{phase}/share") for name in whole}
        for name, ref in whole.items():
            ops.all_gather(ref, shares[name], bounds=self._shards.bounds[name])


class ShardedWeights(GatheredWeights):
    """Weights of which each rank holds its share alone: a part's are gathered into slots for each use, of shares that
    come from the host where they live there.

    Frozen rows are whole on every rank.
    """

    def __init__(self, rows: Sequence[Row], dtype: str, master_dtype: str | None, **about: Any) -> None:
        super().__init__(rows, dtype, master_dtype, **about)
        self._whole = {row.name: replace(self.refs[row.name], home="device") for row in self._shards.rows}
        self.refs = {**self.refs, **self._own}

    @property
    def first(self) -> ShardedWeights:
        """The same: every walk gathers them."""
        return self

    def gather(self, ops: Any) -> None:
        """Nothing is held whole."""

    def _fetch(self, ops: Any, part: str | int, phase: str) -> dict[str, Ref]:
        """Slots by row name with the whole of each row of a part."""
        rows = [row for row in self._shards.rows if row.name in self._names[part]]
        slots = {}
        for row in rows:
            # A tied head reads the embedding in another part of the same phase: two slots, each with a short life.
            name = f"{phase}/{'' if part_of(row) == part else f'{part}/'}{row.name}"
            slots[row.name] = replace(self._whole[row.name], name=name, space="activation", cell=row.name)
        self._gather(ops, slots, phase)
        return slots
