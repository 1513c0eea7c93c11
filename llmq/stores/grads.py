"""Gradients that every rank holds whole: sums over the tokens of a step, in the accumulation dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llmq.rows import Row
from llmq.stores.bundles import Bundle, branch, bundle_tree
from llmq.stores.weights import tie_head
from llmq.tensor import Ref


class ReplicatedGrads:
    """Refs of all gradients in `dtype`. The first write of a row in a step overwrites, later ones add (the plan's)."""

    def __init__(self, rows: Sequence[Row], dtype: str) -> None:
        self.refs = {row.name: Ref(row.name, "grad", row.shape, dtype, row.layer) for row in rows}
        self._tree = bundle_tree(tie_head(self.refs))

    def bundle(self, prefix: str) -> Bundle:
        """The gradients below `prefix`: embed, head or layers.N."""
        return branch(self._tree, prefix)

    def walk(self, ops: Any, layers: Iterable[int]) -> Iterator[Bundle]:
        """Yields each layer's gradients; with one rank there is nothing to reduce after its last write."""
        for layer in layers:
            yield self.bundle(f"layers.{layer}")
