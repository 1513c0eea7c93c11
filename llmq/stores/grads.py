"""Gradients that every rank holds whole: sums over the tokens of a step, in the accumulation dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmq.row import Row
from llmq.stores.bundles import Bundle, names_by_part, part_bundle, part_tree
from llmq.tensor import Ref


def gradient_slots(refs: Mapping[str, Ref]) -> dict[str, Ref]:
    """By row name, slots in which the gradients of one micro-step are made."""
    return {
        name: replace(ref, name=f"gradient/{name}", space="activation", home="device", is_sum=True, cell=name)
        for name, ref in refs.items()
    }


class ReplicatedGrads:
    """Refs of the gradients of all rows that are trained; of a frozen one the bundles have None.

    The first write of a row in a step overwrites, later ones add (llmq/plan/passes/accumulate.py). `last` says whether
    the micro-step is the last one of a step, after which a row has its sum. `home` is where they live: where that is
    the host, HostedGrads walks them.
    """

    def __init__(self, rows: Sequence[Row], dtype: str, *, last: bool = False, home: str = "device") -> None:
        self.last = last
        trained = [row for row in rows if row.trainable]
        self.refs = {
            row.name: Ref(row.name, "grad", row.shape, dtype, row.layer, home=home, is_stack=row.stacked)
            for row in trained
        }
        self._names = names_by_part(rows)

    def walk(self, ops: Any, parts: Iterable[str | int]) -> Iterator[Bundle]:
        """Yields each part's gradients, and reduces them when the next one's are asked for."""
        for part in parts:
            # The generator continues when the part's backward is recorded, so the reduction follows its last write.
            here = self.added_to(part)
            yield self.bundle(part, here)
            self.reduce(ops, part, here)

    def added_to(self, part: str | int) -> dict[str, Ref]:
        """By row name, what a part adds to."""
        return {name: self.refs[name] for name in self._names[part] if name in self.refs}

    def bundle(self, part: str | int, here: Mapping[str, Ref]) -> Bundle:
        """What a part writes, where `here` is what it adds to."""
        # None for a frozen row: an op skips an output that is not wanted, so block code needs no 'if'.
        return part_bundle(part_tree({name: here.get(name) for name in self._names[part]}), part)

    def reduce(self, ops: Any, part: str | int, here: dict[str, Ref]) -> dict[str, Ref]:
        """Makes sums over ranks of what a part has written; returns what is to be kept of `here`: of one rank, all."""
        return here

    def sums(self, ops: Any) -> Iterator[Ref]:
        """Yields what the optimizer reads: the gradient of each trained row, and entry of a stack, in order."""
        for ref in self.refs.values():
            yield from ref.entries

    def shares(self, ops: Any) -> Iterator[Ref]:
        """Yields what this rank adds to the norm of the whole gradient."""
        return self.sums(ops)
