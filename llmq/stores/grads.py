"""Gradients that every rank holds whole: sums over the tokens of a step, in the accumulation dtype."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmq.row import Row
from llmq.stores.bundles import Bundle, part_bundle, part_tree
from llmq.tensor import Ref


def gradient_slots(refs: Mapping[str, Ref]) -> dict[str, Ref]:
    """By row name, slots in which the gradients of one micro-step are made."""
    return {
        name: replace(ref, name=f"gradient/{name}", space="activation", is_sum=True, cell=name)
        for name, ref in refs.items()
    }


class ReplicatedGrads:
    """Refs of the gradients of all rows that are trained; of a frozen one the bundles have None.

    The first write of a row in a step overwrites, later ones add (llmq/plan/passes/accumulate.py). `last` says whether
    the micro-step is the last one of a step, after which a row has its sum.
    """

    def __init__(self, rows: Sequence[Row], dtype: str, *, last: bool = False) -> None:
        self.last = last
        trained = [row for row in rows if row.trainable]
        self.refs = {
            row.name: Ref(row.name, "grad", row.shape, dtype, row.layer, is_stack=row.stacked) for row in trained
        }
        self._tree = part_tree({row.name: self.refs.get(row.name) for row in rows})

    def walk(self, ops: Any, parts: Iterable[str | int]) -> Iterator[Bundle]:
        """Yields each part's gradients; with one rank there is nothing to reduce after the last write."""
        for part in parts:
            yield part_bundle(self._tree, part)

    def sums(self, ops: Any, only: Container[str] | None = None) -> Iterator[Ref]:
        """Yields what the optimizer reads: the gradient of each trained row, or of those named in `only`, and entry of
        a stack, in order."""
        for ref in self._of_rows(only):
            yield from ref.entries

    def shares(self, ops: Any, only: Container[str] | None = None) -> Iterator[Ref]:
        """Yields what this rank adds to the norm of the whole gradient, or of those rows."""
        return self.sums(ops, only)

    def _of_rows(self, only: Container[str] | None) -> Iterator[Ref]:
        return (ref for name, ref in self.refs.items() if only is None or name in only)
