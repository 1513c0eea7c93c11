"""Calls whose results are never read are not made: the weight gradients of frozen rows, and what only they read."""

from __future__ import annotations

from collections.abc import Sequence

from llmq.ops.record import Call


def prune(calls: Sequence[Call]) -> list[Call]:
    """The calls that something outlasting the program depends on. One sweep from the end finds them all, as reads
    come after writes."""
    read: set[tuple[str, bool]] = set()
    kept = []
    for call in reversed(calls):
        refs = [result.ref for result in call.outputs if result is not None]
        if any(ref.space != "activation" or (ref.name, ref.again) in read for ref in refs):
            # The name stays in `read`: pieces of a slot, and sums into it, are written by several calls.
            kept.append(call)
            read.update((ref.name, ref.again) for ref in call.inputs if ref is not None)
    return kept[::-1]
