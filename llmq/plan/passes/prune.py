"""Calls whose results are never read are not made: the weight gradients of frozen rows, and what only they read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llmq.ops.record import Call
from llmq.tensor import Ref


def prune(calls: Sequence[Call]) -> list[Call]:
    """The calls that something outlasting the program depends on. One sweep from the end finds them all, as reads
    come after writes."""
    read: set[tuple[str, bool]] = set()
    kept = []
    for call in reversed(calls):
        # One read result keeps the whole call; which of its forms are made is decided later, by `forms`.
        if any(result is not None and _is_read(result.ref, read) for result in call.outputs):
            # The name stays in `read`: pieces of a slot, and sums into it, are written by several calls.
            kept.append(call)
            read.update((ref.name, ref.again) for ref in call.inputs if ref is not None)
    return kept[::-1]


def _is_read(ref: Ref, read: Collection[tuple[str, bool]]) -> bool:
    """Whether a later call reads a slot, or it outlasts the program."""
    return ref.space != "activation" or (ref.name, ref.again) in read
