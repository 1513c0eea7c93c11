"""Weights that every rank holds whole, always resident: the copies that matmuls and norms read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llmq.rows import Row
from llmq.stores.bundles import Bundle, branch, bundle_tree
from llmq.tensor import Ref


class ReplicatedWeights:
    """Refs of all parameters in `dtype`; a tied head reads the embedding."""

    def __init__(self, rows: Sequence[Row], dtype: str) -> None:
        refs = {row.name: Ref(row.name, "weight", row.shape, dtype, row.layer) for row in rows}
        self.refs = refs
        self._tree = bundle_tree(tie_head(refs))

    def bundle(self, prefix: str) -> Bundle:
        """The tensors below `prefix`: embed, head or layers.N."""
        return branch(self._tree, prefix)

    def walk(self, ops: Any, layers: Iterable[int], phase: str) -> Iterator[tuple[int, Bundle]]:
        """Yields (layer, bundle) in the order given; a resident store has nothing to fetch or release."""
        for layer in layers:
            yield layer, self.bundle(f"layers.{layer}")


def tie_head(refs: dict[str, Ref]) -> dict[str, Ref]:
    """The same table with `head.weight` for a tied model, whose head is the embedding."""
    return {"head.weight": refs["embed.weight"], **refs}
