"""Optimizer state that every rank holds whole: master parameters and the two moments of AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llmq.row import Row
from llmq.tensor import Ref


class State(NamedTuple):
    """What the optimizer keeps of a row."""

    master: Ref
    m: Ref
    v: Ref


class ReplicatedMoments:
    """The state of all rows that are trained. A master of the weights' dtype is the weight itself."""

    def __init__(self, rows: Sequence[Row], master_dtype: str, m_dtype: str, v_dtype: str) -> None:
        dtypes = {"master": master_dtype, "m": m_dtype, "v": v_dtype}
        self.rows = tuple(row for row in rows if row.trainable)
        self.refs = {
            row.name: State(
                *(
                    Ref(row.name, space, row.shape, dtype, row.layer, is_stack=row.stacked)
                    for space, dtype in dtypes.items()
                )
            )
            for row in self.rows
        }

    def walk(self, ops: Any, *, masters_only: bool = False) -> Iterator[tuple[Row, State]]:
        """Yields each row, and entry of a stack, with its state, which is written back when the next one is asked for;
        a resident store has nothing to move. `masters_only` when m and v are not read."""
        for row in self.rows:
            states = zip(*(ref.entries for ref in self.refs[row.name]), strict=True)
            yield from zip(row.entries, map(State._make, states), strict=True)
