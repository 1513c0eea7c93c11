"""Gradients and optimizer states that live on the host: pieces of them come to the device when they are used."""

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from llmq.optimizers.rule import MASTER
from llmq.row import Row
from llmq.stores.fetched_weights import one_ahead
from llmq.stores.replicated import Bundle, ReplicatedGrads, StatePiece, Update, each_of
from llmq.tensor import DTYPES, NORM_ROWS, Origin, Ref, changed, stored_bytes, stored_dtype

MOST_PIECES = 4096  # of all that is fetched, about: each takes a handful of calls to plan, to bind and to capture


def size_of_pieces(refs: Iterable[Ref], least_bytes: int) -> int:
    """Bytes of a piece of these tensors: `least_bytes`, and more where there would be too many."""
    return max(least_bytes, sum(map(stored_bytes, refs)) // MOST_PIECES)


def chunks_of_tiles(ref: Ref, row_bytes: int, num_bytes: int) -> list[tuple[int, int]]:
    """(start, count) of the rows of each piece of a tensor, `row_bytes` a row: at most `num_bytes`, in whole tiles of
    NORM_ROWS rows and one at least. A vector is one piece."""
    rows = math.prod(ref.shape[:-1])
    # One tile at least, even of a row wider than a piece: a part of a tile would change partial sums and scales.
    size = NORM_ROWS * max(1, num_bytes // max(1, NORM_ROWS * row_bytes))
    if len(ref.shape) == 1 or rows <= size:
        return [(0, rows)]
    return [(start, min(size, rows - start)) for start in range(0, rows, size)]


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
                ref = self.refs[name]
                # Of the gradient those rows that are kept of the slot for it.
                whole = ref if kept.view is None else ref.chunk(kept.rows_before, math.prod(kept.shape[:-1]))
                ops.copy_to_host(whole, kept)

    def sums(self, ops: Any) -> Iterator[Ref]:
        """Yields what the optimizer reads, where it is on the host."""
        yield from self._store.sums(ops)

    def shares(self, ops: Any) -> Iterator[Ref]:
        """Yields what this rank adds to the norm of the whole gradient, and fetches a piece ahead."""
        shares: Iterator[Ref] = self._store.shares(ops)
        if self._in_place:
            return shares
        pieces: list[Ref] = []
        for ref in shares:
            # Whole tiles, as partial sums of squares belong to 128 rows: the norm has the bits of one that was not cut.
            chunks = chunks_of_tiles(ref, ref.shape[-1] * DTYPES[ref.dtype].itemsize, self._piece_bytes)
            pieces += [ref.chunk(*rows) for rows in chunks] if len(chunks) > 1 else [ref]
        return one_ahead(_fetched(ops, ref) for ref in pieces)

    def _fetch(self, ops: Any, part: str | int) -> dict[str, Ref]:
        """Slots by row name for what a part adds to."""
        slots = {}
        for name, ref in self._store.added_to(part).items():
            about: dict[str, Any] = {
                "space": "activation",
                "home": "device",
                "is_sum": True,
                "origin": Origin(cell=name),
            }
            slots[name] = replace(ref, name=f"gradient/{part}/{name}", **about)
            ops.copy_to_device(slots[name], ref)
        return slots


def _fetched(ops: Any, ref: Ref) -> Ref:
    """A slot with a gradient, or a piece of one."""
    start = f"/{ref.start}" if ref.view else ""
    slot = Ref(f"gradient/{ref.name}{start}", "activation", ref.shape, ref.dtype, ref.layer)
    ops.copy_to_device(slot, ref)
    return slot


class HostedMoments:
    """The states of another store, of which some `spaces` (such as master) live on the host, and with them `grads`: the
    gradients that live there, by row name.

    What is fetched of a row at a time is at most `piece_bytes`, of a large model more (`size_of_pieces`), in whole
    tiles of 128 rows and one at least; a row that `is_cut` refuses and a vector come whole. About
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
        self._grads = {ref.name: ref for ref in grads.values()}
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
            row_bytes = width * sum(stored_dtype(ref).itemsize for ref in fetched)
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
    return changed(slot, form=ref.form)
