"""Several low-rank adapters of one linear map: s B A x with the A and B that a row of the batch has.

The map itself is computed for all rows at once. An adapter's products read and write its rows alone: they are those of
a run of this adapter alone, and together have as many terms as those of one adapter. One adapter of all ranks summed,
with what is not a row's own set to 0, was the other way: fewer calls, and as many times the terms as adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llmq.op_protocol import Ops
from llmq.protocols import Parameters, Slots
from llmq.row import SEVERAL, Row
from llmq.sites.lora import DroppedAdapter, LoraAdapter, Some, dropped_slots
from llmq.tensor import Ref, Slot


@dataclass(frozen=True)
class OwnRows:
    """The adapter of a name at a site: rows [start, stop) of the batch are its own."""

    name: str
    adapter: LoraAdapter | DroppedAdapter
    start: int
    stop: int


class SeveralAdapters:
    """Adapters at the site `name`, each with its own rows of a batch; rows of none are those of the map alone."""

    def __init__(self, name: str, several: Sequence[OwnRows], batch_size: int) -> None:
        self.name, self.key = name, name.rpartition(".")[2]
        # One slot for all: rows of an adapter of a smaller rank leave the rest of it unread.
        self.width = max(one.adapter.rank for one in several)
        self.several = [replace(one, adapter=one.adapter.within(self.width)) for one in several]
        self.has_dropout = any(isinstance(one.adapter, DroppedAdapter) for one in several)
        # Only then may an adapter's product come first: rows of none would be left unwritten.
        self.covers = sum(one.stop - one.start for one in several) == batch_size
        self.fills = self.covers and all(one.adapter.fills for one in several)

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """A x (...,R) of the adapters of all rows, and what dropout leaves of x."""
        low = Slot(f"{self.key}.low", (*x.shape[:-1], self.width), x.roles)
        return (low, *(dropped_slots(self.key, x) if self.has_dropout else ()))

    def rows(self, layer: int | None) -> Iterator[Row]:
        """A and B of every adapter, whose names have that of the adapter."""
        for one in self.several:
            for row in one.adapter.rows(layer):
                name = f"{self.name}.{SEVERAL}.{one.name}{row.name.removeprefix(self.name)}"
                yield replace(row, name=name, adapter=one.name)

    def forward(self, ops: Ops, a: Slots, y: Ref, x: Ref, w: Parameters, residual: Ref | None) -> None:
        """What adapters have of y (...,N) <- s B A x + residual (...,N) or None."""
        for piece in self.pieces(x):
            own = getattr(getattr(w, SEVERAL), piece.name)
            piece.adapter.forward(ops, piece.frame(a), piece.of(y), piece.of(x), own, piece.of(residual))

    def backward(
        self, ops: Ops, a: Slots, d: Slots, d_x: Ref, dw: Parameters, d_y: Ref, x: Ref, w: Parameters, plus: Ref | None
    ) -> None:
        """What adapters have of d_x (...,K), gradients of A and B <- d_y (...,N), x (...,K), plus (...,K)."""
        for piece in self.pieces(x):
            own, d_own = (getattr(getattr(bundle, SEVERAL), piece.name) for bundle in (w, dw))
            read = (piece.of(d_y), piece.of(x), own, piece.of(plus))
            piece.adapter.backward(ops, piece.frame(a), piece.frame(d), piece.of(d_x), d_own, *read)

    def pieces(self, x: Ref) -> Iterator[OwnTokens]:
        """Each adapter that has any of x, which may be a chunk of the batch's tokens."""
        length, before, count = x.entire.shape[-2], x.rows_before, math.prod(x.shape[:-1])
        names = tuple(slot.name for slot in self.slots(Slot("x", x.shape)))
        for one in self.several:
            # x may be a chunk of the head's, or a tile: an adapter without a token in it has no call.
            start, stop = max(one.start * length - before, 0), min(one.stop * length - before, count)
            if start < stop:
                yield OwnTokens(one.name, one.adapter, start, stop - start, names)


@dataclass(frozen=True)
class OwnTokens:
    """The adapter of a name, with its tokens [start, start + count) of an x."""

    name: str
    adapter: LoraAdapter | DroppedAdapter
    start: int
    count: int
    slots: tuple[str, ...]  # of the site, which have tokens of all

    def of(self, ref: Some) -> Some:
        """Its tokens of a tensor (...,N), if there is one."""
        return ref if ref is None else ref.chunk(self.start, self.count)

    def frame(self, a: Slots) -> Slots:
        """A frame with its tokens of the site's slots."""
        return a.chunk(self.slots, self.start, self.count)
