"""Optimizer state: master parameters and the states of a rule, which a rank holds whole or its share of."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llmq.optimizers.rule import MASTER, State, StateKind
from llmq.row import Row
from llmq.stores.sharding import Sharding, Shards
from llmq.tensor import Form, Ref

# The form of a trained weight that has no wider master: the optimizer updates it in its place.
MASTER_FORM = Form("e4m3", "row", "powers")


class StatePiece(NamedTuple):
    """One call of the optimizer; `first` is the place of the state's first element in the whole row.

    `rows` (start, count) are those that it has of what this rank has of the row; None: all. `grad` is the gradient
    where it was fetched with the state.
    """

    state: State
    first: int = 0
    rows: tuple[int, int] | None = None
    grad: Ref | None = None

    def of(self, ref: Ref | None) -> Ref | None:
        """The same piece of the row's weight, if copies of it are written, or gradient."""
        return ref if ref is None or self.rows is None else ref.chunk(*self.rows)


class Update(NamedTuple):
    """A row, or an entry of a stack, with the pieces of its state, which are asked for one after the other."""

    row: Row
    pieces: Iterable[StatePiece]


class ReplicatedMoments:
    """The state of all rows that are trained: a master, and each of `kinds` in its dtype.

    A master of the weights' dtype, or of a row that is held in 8 bits, is the weight itself.
    """

    def __init__(self, rows: Sequence[Row], master_dtype: str, kinds: Mapping[StateKind, str]) -> None:
        self.rows = tuple(row for row in rows if row.trainable)
        self.refs = {row.name: _state(row, master_dtype, kinds) for row in self.rows}

    def walk(self, ops: Any, *, masters_only: bool = False, only: Container[str] | None = None) -> Iterator[Update]:
        """Yields each row, and entry of a stack, with its state as one piece; a resident store has nothing to move.
        `masters_only` when no other state is read; `only`: the rows of these names."""
        for row in self._of(only):
            state = self.refs[row.name]
            # One call of the optimizer for each entry: entries of a stack have scales and norms of their own.
            for one, entry in zip(row.entries, zip(*(ref.entries for ref in state.values()), strict=True), strict=True):
                yield Update(one, (StatePiece(dict(zip(state, entry, strict=True))),))

    def _of(self, only: Container[str] | None) -> Iterator[Row]:
        return (row for row in self.rows if only is None or row.name in only)


class ShardedMoments(ReplicatedMoments):
    """The state of this rank's share of every row."""

    def __init__(
        self, rows: Sequence[Row], master_dtype: str, kinds: Mapping[StateKind, str], *, sharding: Sharding
    ) -> None:
        super().__init__(rows, master_dtype, kinds)
        self._shards = Shards(rows, sharding.size, sharding.rank)
        self.refs = {name: each_of(state, self._shards.share) for name, state in self.refs.items()}

    def walk(self, ops: Any, *, masters_only: bool = False, only: Container[str] | None = None) -> Iterator[Update]:
        """Yields each row with this rank's share of its state."""
        for row in self._of(only):
            # The place in the whole row addresses the bits of stochastic rounding, so shards round as one rank does.
            yield Update(row, (StatePiece(self.refs[row.name], self._shards.first(row)),))


def each_of(state: State, change: Callable[[Ref], Ref]) -> State:
    """A state with each of its tensors changed."""
    return {space: change(ref) for space, ref in state.items()}


def _state(row: Row, master_dtype: str, kinds: Mapping[StateKind, str]) -> State:
    """What is kept of a row."""
    return {MASTER: _master(row, master_dtype), **{kind.name: _ref(row, kind, kinds[kind]) for kind in kinds}}


def _master(row: Row, dtype: str) -> Ref:
    """The master of a row; that of one which is held in 8 bits is the weight."""
    # Two names for the same bytes would need a copy between them after each step.
    if row.stored is not None:
        return Ref(row.name, "weight", row.shape, dtype, row.layer, form=row.stored)
    return Ref(row.name, MASTER, row.shape, dtype, row.layer, is_stack=row.stacked)


def _ref(row: Row, kind: StateKind, dtype: str) -> Ref:
    """A state of a row; one in 8 bits is a number of f32 in a form."""
    # Ops read and write f32; the form says how 8 bits stand for it, with a scale for each block of numbers.
    form = kind.form(dtype)
    return Ref(row.name, kind.name, row.shape, "fp32" if form else dtype, row.layer, form=form, is_stack=row.stacked)
