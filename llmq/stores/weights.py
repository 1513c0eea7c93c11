"""Weights that every rank holds whole, always resident: the copies that matmuls and norms read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llmq.model.parameters import Row
from llmq.stores.bundles import Bundle, part_bundle, part_tree
from llmq.tensor import Ref


class ReplicatedWeights:
    """Refs of all parameters in `dtype`; one whose master has the same dtype is its own master.

    A frozen row has no master. It is held in its own dtype, if it has one.
    """

    def __init__(self, rows: Sequence[Row], dtype: str, master_dtype: str) -> None:
        self.rows = tuple(rows)
        self.refs = {row.name: self._ref(row, dtype, master_dtype) for row in rows}
        self._tree = part_tree(self.refs)

    def walk(self, ops: Any, parts: Iterable[str | int], phase: str) -> Iterator[tuple[str | int, Bundle]]:
        """Yields (part, bundle) in the order given; a resident store has nothing to fetch or release."""
        for part in parts:
            yield part, part_bundle(self._tree, part)

    def written(self, ops: Any) -> Iterator[Ref]:
        """Yields what the copies of each trained row are written to; they are where they belong when the next row's is
        asked for."""
        for row in self.rows:
            if row.trainable:
                yield self.refs[row.name]

    def frozen(self) -> list[Ref]:
        """The rows that are not trained, whose copies are made once."""
        return [self.refs[row.name] for row in self.rows if not row.trainable]

    def _ref(self, row: Row, dtype: str, master_dtype: str) -> Ref:
        is_master = row.trainable and dtype == master_dtype and row.home == "device"
        value_in = "master" if is_master else None
        return Ref(row.name, "weight", row.shape, row.dtype or dtype, row.layer, home=row.home, value_in=value_in)
