"""Rows that an iterable of the caller gives, read as those of a file are: once, where it is an iterator.

A run finds them by a name that they have while it lasts. It resumes by reading past the rows that it has had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import Any

from llmq.data.rows.row_files import BadRow, Located, Row, as_row, kind_of
from llmq.errors import DataError, UsageError

LOOKED_AT = 32  # rows that the format is found from; they are read again
PREFIX = "held:"  # of names
_HELD: ContextVar[Mapping[str, HeldRows]] = ContextVar("held", default={})  # noqa: B039 -- which stays empty


@contextmanager
def holding(name: str, rows: HeldRows) -> Iterator[None]:
    """Within, `held` finds the rows by a name."""
    token = _HELD.set({**_HELD.get(), name: rows})
    try:
        yield
    finally:
        _HELD.reset(token)


def held(name: str) -> HeldRows | None:
    """The rows of that name; None for the name of something else. UsageError for rows of a run that is over."""
    rows = _HELD.get().get(name)
    if name.startswith(PREFIX) and rows is None:
        raise UsageError(
            f"{name} are rows that a Python program gave: resume with the same in Trainer.train(train=...)"
        )
    return rows


class HeldRows:
    """A File of the rows of an iterable, which the caller gave as the argument `name`; `evaluation` is a file of rows
    to evaluate on."""

    is_here = True
    size = 0

    def __init__(self, rows: Iterable[Any], name: str, evaluation: str | None = None) -> None:
        self.name, self._rows, self.evaluation = name, rows, evaluation
        self._is_iterator = iter(rows) is rows
        self._first: list[Any] = []  # of an iterator, as they can be read again
        self._taken = 0  # of an iterator

    def fetched(self) -> Any:
        """Itself."""
        return nullcontext(self)

    def identity(self) -> Any:
        """Nothing that is known ahead of reading."""
        return ["rows of the caller"]

    def rows(self, start: int = 0) -> Iterator[Located]:
        """Each row from `start` on. DataError for rows of an iterator that are gone."""
        is_text = None
        for number, row in enumerate(self._from_first()):
            is_text = isinstance(row, str) if is_text is None else is_text
            if number >= start:
                yield number, partial(self._row, number, row, is_text)

    def _from_first(self) -> Iterator[Any]:
        if not self._is_iterator:
            yield from self._rows
            return
        yield from islice(self._first, None)
        if self._taken > len(self._first):
            raise DataError(
                f"{self.name}: the iterator has given {self._taken} rows, and cannot give them again: use a list, an "
                "iterable that begins again, more rows or fewer steps"
            )
        for row in self._rows:
            self._taken += 1
            if len(self._first) < LOOKED_AT and self._taken == len(self._first) + 1:
                self._first.append(row)
            yield row
        if not self._taken:
            raise DataError(f"{self.name} has no rows: an iterator gives them once, so give a new one for each run")

    def _row(self, number: int, row: Any, is_text: bool) -> Row:
        place = f"{self.name}:{number + 1}"
        if isinstance(row, str) and is_text:
            row = {"text": row}
        elif is_text:
            return BadRow(place, f"{kind_of(row)}, and the rows before are texts")
        return as_row(place, dict(row) if isinstance(row, Mapping) else row)

    def num_rows(self) -> int:
        """Asked for only where a pass has no rows."""
        return 0
