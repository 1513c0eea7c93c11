"""Weights of many ranks, each of which updates its share of every row: gathered once in a step, or for each use."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from llmq.row import Row
from llmq.stores.sharding import Sharding, Shards, part_of
from llmq.stores.weights import ReplicatedWeights
from llmq.tensor import Ref


class GatheredWeights(ReplicatedWeights):
    """Weights that every rank holds whole. The update writes this rank's share of each, in the forms in which shares
    are those of the whole; all are gathered in the next forward pass, each part while the one before it computes."""

    def __init__(self, rows: Sequence[Row], dtype: str, master_dtype: str, *, sharding: Sharding) -> None:
        super().__init__(rows, dtype, None)
        self._shards, self._gathers = Shards(rows, sharding.size, sharding.rank), False
        self._own = {
            row.name: self._shards.share(
                replace(whole, space="shard", value_in="master" if whole.dtype == master_dtype else None)
            )
            for row in self._shards.rows
            for whole in [self.refs[row.name]]
        }

    @property
    def first(self) -> GatheredWeights:
        """The weights as the first micro-step of a step walks them, whose forward pass gathers them."""
        found = copy(self)
        found._gathers = True
        return found

    def gather(self, ops: Any) -> None:
        """Makes all weights whole for what reads them before the next step does."""
        self._gather(ops, self._shards.rows, self.refs)

    def written(self, ops: Any, only: Container[str] | None = None) -> Iterator[Ref | None]:
        """Yields this rank's share of each trained row."""
        yield from (ref for name, ref in self._own.items() if only is None or name in only)

    def _needed(self, parts: tuple[str | int, ...]) -> tuple[str | int, ...]:
        return parts if "head" in parts else (*parts, "head")  # which is used first on the way back

    def _fetch(self, ops: Any, part: str | int, phase: str) -> dict[str, Ref]:
        """Makes the rows of a part whole where they are; returns what is to be read in their place."""
        if self._gathers and phase == "forward":
            self._gather(ops, [row for row in self._shards.rows if part_of(row) == part], self.refs)
        return {}

    def _gather(self, ops: Any, rows: Iterable[Row], whole: dict[str, Ref]) -> None:
        for row in rows:
            ops.all_gather(whole[row.name], self._own[row.name], bounds=self._shards.bounds[row.name])


class ShardedWeights(GatheredWeights):
    """Weights of which each rank holds its share alone: a part's are gathered into slots for each use.

    Frozen rows are whole on every rank.
    """

    def __init__(self, rows: Sequence[Row], dtype: str, master_dtype: str, *, sharding: Sharding) -> None:
        super().__init__(rows, dtype, master_dtype, sharding=sharding)
        self._whole = {row.name: self.refs[row.name] for row in self._shards.rows}
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
            name = f"{phase}/{'' if part_of(row) == part else f'{part}/'}{row.name}"
            slots[row.name] = replace(self._whole[row.name], name=name, space="activation", cell=row.name)
        self._gather(ops, rows, slots)
        return slots
