"""Optimizer states that live on the host: a piece of them is fetched while the one before it is updated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from itertools import groupby
from typing import Any

from llmq.changed import changed
from llmq.optimizers.rule import MASTER
from llmq.row import Row
from llmq.stores.bundles import one_ahead
from llmq.stores.moments import StatePiece, Update, each_of
from llmq.stores.pieces import chunks_of_tiles, size_of_pieces
from llmq.tensor import DTYPES, Ref


class HostedMoments:
    """The states of another store, of which some `spaces` (such as master) live on the host, and with them `grads`: the
    gradients that live there, by row name.

    What is fetched of a row at a time is at most `piece_bytes`, of a large model more (`size_of_pieces`), in whole
    tiles of 128 rows and one at least; a row that `is_cut` refuses, a vector and an entry of a stack come whole. About
    three pieces are on the device at once: one that is updated, one on its way here and one on its way back. `in_place`
    nothing is fetched: what updates a row reads and writes the host's memory.
    """

    def __init__(
        self,
        moments: Any,
        spaces: Collection[str],
        *,
        grads: Mapping[str, Ref],
        piece_bytes: int,
        is_cut: Callable[[Row], bool],
        in_place: bool = False,
    ) -> None:
        self._moments, self._is_cut, self._in_place = moments, is_cut, in_place
        self._spaces = frozenset(spaces)
        self._grads = {one.name: one for ref in grads.values() for one in ref.entries}
        fetched = [ref for state in moments.refs.values() for ref in state.values() if ref.space in self._spaces]
        self._piece_bytes = size_of_pieces([*fetched, *grads.values()], piece_bytes)
        self.refs = {name: each_of(state, self._at_home) for name, state in moments.refs.items()}

    def walk(self, ops: Any, *, masters_only: bool = False, only: Container[str] | None = None) -> Iterator[Update]:
        """Yields each row with the pieces of its state; a piece is written back when the next one is asked for.
        `masters_only`: neither other states nor gradients are fetched, and nothing is written back."""
        # Publishing reads masters alone: the other states would travel for nothing.
        moving = self._spaces & {MASTER} if masters_only else self._spaces
        if self._in_place or (masters_only and not moving):
            for row, pieces in self._moments.walk(ops, masters_only=masters_only, only=only):
                yield Update(row, (each._replace(state=each_of(each.state, self._at_home)) for each in pieces))
            return
        fetched = self._fetched(ops, moving, only, is_update=not masters_only)
        for row, pieces in groupby(fetched, key=lambda one: one[0]):
            yield Update(row, (piece for _, piece in pieces))

    def _fetched(
        self, ops: Any, moving: Collection[str], only: Container[str] | None, *, is_update: bool
    ) -> Iterator[tuple[Row, StatePiece]]:
        """Every piece of every row in order, on the device; the next one is fetched before this one is used."""
        # A list, as every piece is asked for twice: when it is fetched and when it is written back.
        pieces = [(update.row, piece) for update in self._moments.walk(ops, only=only) for piece in self._cut(update)]
        coming = (self._fetch(ops, row, piece, moving, with_grad=is_update) for row, piece in pieces)
        for (row, held), here in zip(pieces, one_ahead(coming), strict=True):
            yield row, here
            for ref, slot in zip(held.state.values(), here.state.values(), strict=True):
                if is_update and ref.space in moving:
                    ops.copy_to_host(self._at_home(ref), slot)

    def _cut(self, update: Update) -> Iterator[StatePiece]:
        """A row's state in pieces, as it is held."""
        grad = self._grads.get(update.row.name)
        for whole in update.pieces:
            master, width = whole.state[MASTER], whole.state[MASTER].shape[-1]
            fetched = [*(ref for ref in whole.state.values() if ref.space in self._spaces), *([grad] if grad else [])]
            row_bytes = width * sum(DTYPES[ref.form.dtype if ref.form else ref.dtype].itemsize for ref in fetched)
            chunks = chunks_of_tiles(master, row_bytes, self._piece_bytes)
            # A measured scale covers the whole weight, so the copy cannot be made before its last piece.
            if len(chunks) == 1 or not self._is_cut(update.row):
                yield whole._replace(grad=grad)
                continue
            for rows in chunks:
                state = {space: ref.chunk(*rows) for space, ref in whole.state.items()}
                yield StatePiece(state, whole.first + rows[0] * width, rows, grad and grad.chunk(*rows))

    def _fetch(self, ops: Any, row: Row, piece: StatePiece, moving: Collection[str], *, with_grad: bool) -> StatePiece:
        """The piece with slots in place of what lives on the host in the spaces `moving`, and of its gradient."""
        # Slots of two pieces have two names, so that both can be alive: one is updated while the next one comes.
        place = f"{row.name}/{piece.rows[0]}" if piece.rows else row.name

        def fetched(ref: Ref) -> Ref:
            return _slot(ops, self._at_home(ref), place) if ref.space in moving else ref

        state = each_of(piece.state, fetched)
        grad = _slot(ops, piece.grad, place) if piece.grad is not None and with_grad else None
        return piece._replace(state=state, grad=grad)

    def _at_home(self, ref: Ref) -> Ref:
        return changed(ref, home="host") if ref.space in self._spaces else ref


def _slot(ops: Any, ref: Ref, place: str) -> Ref:
    """A slot with a copy of what is on the host."""
    slot = Ref(f"{ref.space}/{place}", "activation", ref.shape, ref.dtype, ref.layer)
    ops.copy_to_device(slot, ref)
    return slot.in_form(ref.form)
