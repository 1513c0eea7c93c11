"""Calls whose results are never read are not made: the weight gradients of frozen rows, and what only they read."""

from __future__ import annotations

from collections.abc import Sequence

from llmq.ops.record import Call
from llmq.tensor import Ref


def prune(calls: Sequence[Call]) -> list[Call]:
    """The calls that something outlasting the program depends on. One sweep from the end finds them all, as reads
    come after writes."""
    read: set[tuple[str, bool]] = set()
    kept = []
    for call in reversed(calls):
        refs = [result.ref for result in call.outputs if result is not None]
        if any(ref.space != "activation" or not read.isdisjoint(_names(ref)) for ref in refs):
            # The name stays in `read`: pieces of a slot, and sums into it, are written by several calls.
            kept.append(call)
            read.update((ref.owner, ref.again) for ref in call.inputs if ref is not None)
    return kept[::-1]


def _names(ref: Ref) -> set[tuple[str, bool]]:
    """Under which a slot is read: the copies of a stack's entry by its name, its value by the stack's."""
    return {(ref.name, ref.again), (ref.owner, ref.again)}
