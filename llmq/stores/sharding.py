"""Which rank has which rows of every parameter (ZeRO; Rajbhandari et al., 2020).

A share is of whole tiles of 128 rows, so that the scales of blocks and the partial sums of the norm stay whole. It may
have no rows, and is recorded all the same: all ranks make the same calls, and group the same collectives.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from llmq.row import Row
from llmq.tensor import NORM_ROWS, Form, Ref

Bounds = tuple[int, ...]  # rank r has rows [bounds[r], bounds[r + 1]) of a tensor seen as (rows, last axis)


@dataclass(frozen=True)
class Sharding:
    """The ranks of a run, and what each of them holds of every row: its share, or all of it.

    `states` are masters and moments. Gradients are reduced over ranks in `reduce_dtype` (None: their own), with f32
    sums in order if they are exchanged (`all_to_all`), else rounded on their way from rank to rank. Exchanged ones may
    be `compressed`: what is sent is a copy in this form.
    """

    rank: int = 0
    size: int = 1
    states: bool = False
    gradients: bool = False
    weights: bool = False
    reduce_dtype: str | None = None
    all_to_all: bool = False
    compressed: Form | None = None


ALONE = Sharding()


class Shards:
    """Bounds of every row that is trained, by name, and what they leave to one rank."""

    def __init__(self, rows: Iterable[Row], size: int, rank: int) -> None:
        self.rows = tuple(row for row in rows if row.trainable)
        self.size, self.rank = size, rank

    @cached_property
    def bounds(self) -> Mapping[str, Bounds]:
        """Tiles in turn to all ranks, what is left over, and vectors, to those that have least so far."""
        held, found = [0] * self.size, {}
        for row in self.rows:
            found[row.name], sizes = _cut(row.shape, held)
            held = [sum(pair) for pair in zip(held, sizes, strict=True)]
        return found

    def share(self, ref: Ref) -> Ref:
        """What this rank has of a row, as a tensor of its own; it may have no rows."""
        return replace(ref, shape=self.share_shape(ref.name, ref.shape))

    def share_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of what this rank has of a row of `shape`."""
        count = self.count(name)
        # A vector that one rank has whole stays a vector; rows of a matrix are a matrix.
        return shape if count == _rows(shape) else (count, shape[-1])

    def piece(self, ref: Ref) -> Ref:
        """What this rank has of a row, as a piece of the whole."""
        count = self.count(ref.name)
        return ref if count == _rows(ref.shape) else ref.chunk(self.bounds[ref.name][self.rank], count)

    def count(self, name: str) -> int:
        """Rows that this rank has of a parameter."""
        bounds = self.bounds[name]
        return bounds[self.rank + 1] - bounds[self.rank]

    def first(self, row: Row) -> int:
        """Place in the whole parameter of the first element that this rank has."""
        return self.bounds[row.name][self.rank] * row.shape[-1]

    def tiles(self) -> Bounds:
        """Bounds of the ranks' shares among the partial sums of squares of all rows, one rank's after the other's."""
        found = [0]
        for rank in range(self.size):
            counts = (bounds[rank + 1] - bounds[rank] for bounds in self.bounds.values())
            found.append(found[-1] + sum(-(-count // NORM_ROWS) for count in counts))
        return tuple(found)


def part_of(row: Row) -> str | int:
    """The part of the model that a parameter is of: `embed`, a layer by its number, or `head`."""
    return row.name.partition(".")[0] if row.layer is None else row.layer


def _cut(shape: tuple[int, ...], held: list[int]) -> tuple[Bounds, list[int]]:
    """Bounds of a parameter for ranks that have `held` elements so far, and the elements that each gets."""
    rows = _rows(shape)
    each, rest = divmod(-(-rows // NORM_ROWS), len(held))
    # To the ranks with the least so far: if it were always the first ones, these would have more of every row.
    least = sorted(range(len(held)), key=lambda rank: (held[rank], rank))[:rest]
    bounds = [0]
    for rank in range(len(held)):
        bounds.append(min(rows, bounds[-1] + NORM_ROWS * (each + (rank in least))))
    return tuple(bounds), [shape[-1] * (stop - start) for start, stop in pairwise(bounds)]


def _rows(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1])
