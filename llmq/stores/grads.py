"""Gradients that every rank holds whole: sums over the tokens of a step, in the accumulation dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llmq.model.parameters import Row
from llmq.stores.bundles import Bundle, part_bundle, part_tree
from llmq.tensor import Ref


class ReplicatedGrads:
    """Refs of the gradients of all rows that are trained; of a frozen one the bundles have None.

    The first write of a row in a step overwrites, later ones add (llmq/plan/passes/accumulate.py). `last` says whether
    the micro-step is the last one of a step, after which a row has its sum.
    """

    def __init__(self, rows: Sequence[Row], dtype: str, *, last: bool = False) -> None:
        self.last = last
        self.refs = {row.name: Ref(row.name, "grad", row.shape, dtype, row.layer) for row in rows if row.trainable}
        self._tree = part_tree(self.refs)

    def walk(self, ops: Any, parts: Iterable[str | int]) -> Iterator[Bundle]:
        """Yields each part's gradients; with one rank there is nothing to reduce after the last write."""
        for part in parts:
            yield part_bundle(self._tree, part)
