"""Weights of many ranks, each of which updates its share of every row: gathered after the update, or for each use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from llmq.row import Row
from llmq.stores.bundles import Bundle, part_bundle, part_tree
from llmq.stores.sharding import Sharding, Shards, part_of
from llmq.stores.weights import ReplicatedWeights
from llmq.tensor import Ref


class GatheredWeights(ReplicatedWeights):
    """Weights that every rank holds whole. The update writes this rank's share of each, in the forms in which shares
    are those of the whole, and the others' are gathered."""

    def __init__(self, rows: Sequence[Row], dtype: str, master_dtype: str, *, sharding: Sharding) -> None:
        super().__init__(rows, dtype, None)
        self._shards = Shards(rows, sharding.size, sharding.rank)
        value_in = "master" if dtype == master_dtype else None
        self._own = {
            row.name: self._shards.share(replace(self.refs[row.name], space="shard", value_in=value_in))
            for row in self._shards.rows
        }

    def written(self, ops: Any) -> Iterator[Ref]:
        """Yields this rank's share of each trained row; those of a part are whole again when the next part's is asked
        for."""
        for _, rows in groupby(self._shards.rows, key=part_of):
            names = [row.name for row in rows]
            yield from (self._own[name] for name in names)
            for name in names:
                self._gather(ops, self.refs[name], self._own[name])

    def _gather(self, ops: Any, whole: Ref, share: Ref) -> None:
        ops.all_gather(whole, share, bounds=self._shards.bounds[share.name])


class ShardedWeights(GatheredWeights):
    """Weights of which each rank holds its share alone. A part's are gathered into slots, one part ahead of their use.

    Frozen rows are whole on every rank.
    """

    def __init__(self, rows: Sequence[Row], dtype: str, master_dtype: str, *, sharding: Sharding) -> None:
        super().__init__(rows, dtype, master_dtype, sharding=sharding)
        self._whole = {row.name: self.refs[row.name] for row in self._shards.rows}
        self.refs = {**self.refs, **self._own}

    def walk(self, ops: Any, parts: Iterable[str | int], phase: str) -> Iterator[tuple[str | int, Bundle]]:
        """Yields (part, bundle) in the order given. The next part is fetched before this one is used."""
        coming = iter(parts := tuple(parts))
        fetched = self._fetch(ops, next(coming), phase)
        for part in parts:
            bundle, after = {**self.refs, **fetched}, next(coming, None)
            fetched = {} if after is None else self._fetch(ops, after, phase)
            yield part, part_bundle(part_tree(bundle), part)

    def written(self, ops: Any) -> Iterator[Ref]:
        """Yields this rank's share of each trained row."""
        yield from self._own.values()

    def _fetch(self, ops: Any, part: str | int, phase: str) -> dict[str, Ref]:
        """Slots by row name with the whole of each row of a part; a tied head is the embedding."""
        rows = [row for row in self._shards.rows if part_of(row) == part]
        if part == "head" and "head.weight" not in self.refs:
            rows += [row for row in self._shards.rows if row.name == "embed.weight"]
        slots = {}
        for row in rows:
            name = f"{phase}/{'' if part_of(row) == part else f'{part}/'}{row.name}"
            slots[row.name] = replace(self._whole[row.name], name=name, space="activation", cell=row.name)
            self._gather(ops, slots[row.name], self._own[row.name])
        return slots
