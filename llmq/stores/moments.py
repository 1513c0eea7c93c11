"""Optimizer state: master parameters and the two moments of AdamW, which a rank holds whole or its share of."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from llmq.row import Row
from llmq.stores.sharding import Sharding, Shards
from llmq.tensor import Form, Ref

# The form that a moment in 8 bits is held in, by its space and dtype. Of v it is the root.
FORMS = {
    ("m", "e4m3"): Form("e4m3", "row", "blocks"),
    ("m", "int8"): Form("int8", "row", "blocks"),
    ("v", "e4m3"): Form("e4m3", "row", "blocks"),
    ("v", "int8"): Form("uint8", "row", "blocks"),
}
# The form of a trained weight that has no wider master: the optimizer updates it in its place.
MASTER_FORM = Form("e4m3", "row", "powers")


class State(NamedTuple):
    """What the optimizer keeps of a row, or of this rank's share of it. The master of one that is held in 8 bits is
    the weight."""

    master: Ref
    m: Ref
    v: Ref


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
    """The state of all rows that are trained. A master of the weights' dtype is the weight itself."""

    def __init__(self, rows: Sequence[Row], master_dtype: str, m_dtype: str, v_dtype: str) -> None:
        dtypes = {"master": master_dtype, "m": m_dtype, "v": v_dtype}
        self.rows = tuple(row for row in rows if row.trainable)
        self.refs = {
            row.name: State(*(_ref(row, space, dtype) for space, dtype in dtypes.items())) for row in self.rows
        }

    def walk(self, ops: Any, *, masters_only: bool = False, only: Container[str] | None = None) -> Iterator[Update]:
        """Yields each row, and entry of a stack, with its state as one piece; a resident store has nothing to move.
        `masters_only` when m and v are not read; `only`: the rows of these names."""
        for row in self._of(only):
            states = zip(*(ref.entries for ref in self.refs[row.name]), strict=True)
            yield from (
                Update(one, (StatePiece(State(*state)),)) for one, state in zip(row.entries, states, strict=True)
            )

    def _of(self, only: Container[str] | None) -> Iterator[Row]:
        return (row for row in self.rows if only is None or row.name in only)


class ShardedMoments(ReplicatedMoments):
    """The state of this rank's share of every row."""

    def __init__(
        self, rows: Sequence[Row], master_dtype: str, m_dtype: str, v_dtype: str, *, sharding: Sharding
    ) -> None:
        super().__init__(rows, master_dtype, m_dtype, v_dtype)
        self._shards = Shards(rows, sharding.size, sharding.rank)
        self.refs = {name: State(*map(self._shards.share, state)) for name, state in self.refs.items()}

    def walk(self, ops: Any, *, masters_only: bool = False, only: Container[str] | None = None) -> Iterator[Update]:
        """Yields each row with this rank's share of its state."""
        for row in self._of(only):
            yield Update(row, (StatePiece(self.refs[row.name], self._shards.first(row)),))


def _ref(row: Row, space: str, dtype: str) -> Ref:
    """A state of a row; one in 8 bits is a number of f32 in a form."""
    if space == "master" and row.stored is not None:
        return Ref(row.name, "weight", row.shape, dtype, row.layer, form=row.stored)
    form = FORMS.get((space, dtype))
    return Ref(row.name, space, row.shape, "fp32" if form else dtype, row.layer, form=form, is_stack=row.stacked)
