"""Gradients that live on the host: a part's come to the device when it adds to them, and leave when it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from llmq.row import Row
from llmq.stores.bundles import Bundle, one_ahead
from llmq.stores.grads import ReplicatedGrads
from llmq.stores.pieces import chunks_of_tiles, size_of_pieces
from llmq.tensor import DTYPES, Ref


class HostedGrads:
    """The gradients of another store, on the host. What a part adds to is a slot, which was fetched a part ahead,
    unless nothing has been written to it in this step (llmq/plan/passes/accumulate.py). It is reduced there, and what
    this rank keeps of it is sent to the host.

    The optimizer fetches them with its states: `sums` are those of the host. For the norm they come in pieces of
    `piece_bytes` or more (`size_of_pieces`), of whole tiles of 128 rows; `in_place`: it reads them where they are.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        dtype: str,
        *,
        last: bool = False,
        store: Callable[..., Any] = ReplicatedGrads,
        piece_bytes: int,
        in_place: bool = False,
    ) -> None:
        self._store = store(rows, dtype, last=last, home="host")
        self.last, self.refs = last, self._store.refs
        self._piece_bytes, self._in_place = size_of_pieces(self.refs.values(), piece_bytes), in_place

    def walk(self, ops: Any, parts: Iterable[str | int]) -> Iterator[Bundle]:
        """Yields what each part's gradients are written to, and sends them to the host when the next one's are asked
        for."""
        parts = tuple(parts)
        for part, here in zip(parts, one_ahead(self._fetch(ops, part) for part in parts), strict=True):
            # Recorded for a first write, too, which overwrites: passes/accumulate.py then drops the copy.
            yield self._store.bundle(part, here)
            for name, kept in self._store.reduce(ops, part, here).items():
                ops.copy_to_host(_like(self.refs[name], kept), kept)

    def sums(self, ops: Any) -> Iterator[Ref]:
        """Yields what the optimizer reads, as it is on the host."""
        found: Iterator[Ref] = self._store.sums(ops)
        return found

    def shares(self, ops: Any) -> Iterator[Ref]:
        """Yields what this rank adds to the norm of the whole gradient, and fetches a piece ahead."""
        shares: Iterator[Ref] = self._store.shares(ops)
        if self._in_place:
            return shares
        pieces = chain.from_iterable(map(self._pieces, shares))
        return one_ahead(_fetched(ops, ref) for ref in pieces)

    def _pieces(self, ref: Ref) -> Iterator[Ref]:
        # Whole tiles, as partial sums of squares belong to 128 rows: the norm has the bits of one that was not cut.
        chunks = chunks_of_tiles(ref, ref.shape[-1] * DTYPES[ref.dtype].itemsize, self._piece_bytes)
        yield from (ref.chunk(*rows) for rows in chunks) if len(chunks) > 1 else (ref,)

    def _fetch(self, ops: Any, part: str | int) -> dict[str, Ref]:
        """Slots by row name for what a part adds to."""
        slots = {}
        for name, ref in self._store.added_to(part).items():
            about: dict[str, Any] = {"space": "activation", "home": "device", "is_sum": True, "cell": name}
            slots[name] = replace(ref, name=f"gradient/{part}/{name}", **about)
            ops.copy_to_device(slots[name], ref)
        return slots


def _like(ref: Ref, kept: Ref) -> Ref:
    """A gradient, or the rows of it that are kept of a slot for it."""
    return ref if kept.view is None else ref.chunk(kept.rows_before, math.prod(kept.shape[:-1]))


def _fetched(ops: Any, ref: Ref) -> Ref:
    """A slot with a gradient, or a piece of one."""
    start = f"/{ref.start}" if ref.view else ""
    slot = Ref(f"gradient/{ref.name}{start}", "activation", ref.shape, ref.dtype, ref.layer)
    ops.copy_to_device(slot, ref)
    return slot
