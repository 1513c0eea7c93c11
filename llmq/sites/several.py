"""Several low-rank adapters on one linear map: y = W x + b + s B A x, with the A and B that a row of the batch has.

The map itself is computed for all rows at once. An adapter's products read and write its rows alone: they are those of
a run of this adapter alone, and together have as many terms as those of one adapter. One adapter of all ranks summed,
with what is not a row's own set to 0, was the other way: fewer calls, and as many times the terms as adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmq.row import SEVERAL, Row
from llmq.sites.linear import Linear
from llmq.sites.lora import DroppedLinear, LoraLinear, dropped_slots, with_base
from llmq.tensor import Ref, Slot


@dataclass(frozen=True)
class OwnRows:
    """The adapter of a name at a site: rows [start, stop) of the batch are its own."""

    name: str
    adapter: LoraLinear | DroppedLinear
    start: int
    stop: int


class SeveralLinear:
    """The site `base` with adapters that have rows each of a batch of so many; rows of none are those of the base."""

    def __init__(self, base: Linear, several: Sequence[OwnRows], batch_size: int) -> None:
        self.base, self.name, self.key = base, base.name, base.key
        self.several = tuple(several)
        self.rank = max(one.adapter.rank for one in several)
        self.has_dropout = any(isinstance(one.adapter, DroppedLinear) for one in several)
        self.covers = sum(one.stop - one.start for one in several) == batch_size

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """A x (...,R) of the adapters of all rows, and what dropout leaves of x, beside the slots of the base."""
        return (*self.base.slots(x), *self._own_slots(x))

    def _own_slots(self, x: Slot) -> tuple[Slot, ...]:
        low = Slot(f"{self.key}.low", (*x.shape[:-1], self.rank), x.roles)
        return (low, *(dropped_slots(self.key, x) if self.has_dropout else ()))

    def rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """The base's rows, and A and B of every adapter, whose names have that of the adapter."""
        own = self.base.rows(rows)
        layer = own[0].layer if own else None  # a tied head has no rows
        found = list(own)
        for one in self.several:
            for row in one.adapter.own_rows(layer):
                name = f"{self.name}.{SEVERAL}.{one.name}{row.name.removeprefix(self.name)}"
                found.append(replace(row, name=name, adapter=one.name))
        return tuple(found)

    def forward(self, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None = None) -> None:
        """y (...,N) <- x (...,K), w, residual (...,N) or None."""
        with_base(self, self.base, ops, a, y, x, w, residual)

    def backward(self, ops: Any, a: Any, d: Any, d_x: Ref, dw: Any, d_y: Ref, x: Ref, w: Any) -> None:
        """d_x, dw <- d_y, x, w."""
        self.pull(ops, a, d, d_x, dw, d_y, x, w)

    def fills(self, y: Ref) -> bool:
        """Whether every row has an adapter with all columns of y."""
        return self.covers and all(one.adapter.fills(y) for one in self.several)

    def adapt(self, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None) -> None:
        """What adapters have of y (...,N) <- s B A x + residual (...,N) or None."""
        for one, cut, at in self._pieces(a, x):
            to = None if residual is None else residual.chunk(*at)
            own = getattr(getattr(w, SEVERAL), one.name)
            one.adapter.adapt(ops, cut(a), y.chunk(*at), x.chunk(*at), own, to)

    def pull(self, ops: Any, a: Any, d: Any, d_x: Ref, dw: Any, d_y: Ref, x: Ref, w: Any) -> None:
        """d_x (...,K), all gradients <- d_y (...,N), x (...,K): what adapters add to d_x is written first where every
        row has one."""
        if not self.covers:
            self.base.backward(ops, a, d, d_x, dw, d_y, x, w)
        for one, cut, at in self._pieces(a, x):
            to = None if self.covers else d_x.chunk(*at)
            own, d_own = (getattr(getattr(bundle, SEVERAL), one.name) for bundle in (w, dw))
            about = (cut(a), cut(d), d_x.chunk(*at), d_own, d_y.chunk(*at), x.chunk(*at), own, to)
            one.adapter.adapt_backward(ops, *about)
        if self.covers:
            self.base.backward(ops, a, d, d_x, dw, d_y, x, w, d_x)

    def _pieces(self, a: Any, x: Ref) -> Iterator[tuple[OwnRows, Any, tuple[int, int]]]:
        """Each adapter that has any of x, which may be a chunk of the batch's tokens, with what cuts a frame to its
        own, and (start, count) of its tokens in x."""
        length, before, count = x.entire.shape[-2], x.rows_before, math.prod(x.shape[:-1])
        names = [slot.name for slot in self._own_slots(Slot("x", x.shape))]
        for one in self.several:
            start, stop = max(one.start * length - before, 0), min(one.stop * length - before, count)
            if start < stop:
                at = (start, stop - start)
                yield one, _cutter(names, at), at


def _cutter(names: Sequence[str], at: tuple[int, int]) -> Any:
    """What gives a frame with these rows in place of the slots `names`."""
    return lambda frame: frame.chunk(names, *at)
