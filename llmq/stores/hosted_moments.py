"""Optimizer states that live on the host: a piece of them is fetched while the one before it is updated."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from llmq.row import Row
from llmq.stores.moments import State, StatePiece, Update
from llmq.tensor import DTYPES, NORM_ROWS, Ref


class HostedMoments:
    """The states of another store, of which the `spaces` (master, m, v) live on the host.

    What is fetched of a row at a time is at most `piece_bytes`, in whole tiles of 128 rows and one at least; a row that
    `is_cut` refuses, a vector and an entry of a stack come whole. About three pieces are on the device at once: one
    that is updated, one on its way here and one on its way back.
    """

    def __init__(
        self, moments: Any, spaces: Collection[str], *, piece_bytes: int, is_cut: Callable[[Row], bool]
    ) -> None:
        self._moments, self._piece_bytes, self._is_cut = moments, piece_bytes, is_cut
        self.refs = {
            name: State(*(replace(ref, home="host") if ref.space in spaces else ref for ref in state))
            for name, state in moments.refs.items()
        }
        self._spaces = frozenset(spaces)

    def walk(self, ops: Any, *, masters_only: bool = False) -> Iterator[Update]:
        """Yields each row with the pieces of its state; a piece is written back when the next one is asked for.
        `masters_only`: m and v are not fetched, and nothing is written back."""
        moving = self._spaces & {"master"} if masters_only else self._spaces
        if not moving:
            yield from self._moments.walk(ops, masters_only=masters_only)
            return
        fetched = self._fetched(ops, moving, writes=not masters_only)
        for row, pieces in groupby(fetched, key=lambda one: one[0]):
            yield Update(row, (piece for _, piece in pieces))

    def _fetched(self, ops: Any, moving: Collection[str], *, writes: bool) -> Iterator[tuple[Row, StatePiece]]:
        """Every piece of every row in order, on the device; the next one is fetched before this one is used."""
        pieces = [(update.row, piece) for update in self._moments.walk(ops) for piece in self._cut(update)]
        coming = (_fetch(ops, piece, moving) for _, piece in pieces)
        ahead = next(coming, None)
        for row, held in pieces:
            here, ahead = ahead, next(coming, None)
            assert here is not None
            yield row, here
            if writes:
                _write_back(ops, held, here, moving)

    def _cut(self, update: Update) -> Iterator[StatePiece]:
        """A row's state in pieces, as it is held."""
        for whole in update.pieces:
            master = whole.state.master
            count, width = math.prod(master.shape[:-1]), master.shape[-1]
            row_bytes = width * sum(DTYPES[ref.dtype].itemsize for ref in whole.state if ref.space in self._spaces)
            size = NORM_ROWS * max(1, self._piece_bytes // (NORM_ROWS * row_bytes))
            if len(master.shape) == 1 or count <= size or master.stack is not None or not self._is_cut(update.row):
                yield whole
                continue
            for start in range(0, count, size):
                rows = start, min(size, count - start)
                state = State(*(ref.chunk(*rows) for ref in whole.state))
                yield StatePiece(state, whole.first + start * width, rows)


def _fetch(ops: Any, piece: StatePiece, spaces: Collection[str]) -> StatePiece:
    """The piece with slots in place of what lives on the host in `spaces`."""
    state = []
    for ref in piece.state:
        if ref.space in spaces:
            name = f"{ref.space}/{ref.name}" + (f"/{piece.rows[0]}" if piece.rows else "")
            slot = Ref(name, "activation", ref.shape, ref.dtype, ref.layer)
            ops.copy_to_device(slot, replace(ref, home="host"))
            state.append(slot)
        else:
            state.append(ref)
    return piece._replace(state=State(*state))


def _write_back(ops: Any, held: StatePiece, here: StatePiece, spaces: Collection[str]) -> None:
    """What lives on the host in `spaces` <- its slots."""
    for ref, slot in zip(held.state, here.state, strict=True):
        if ref.space in spaces:
            ops.copy_to_host(replace(ref, home="host"), slot)
