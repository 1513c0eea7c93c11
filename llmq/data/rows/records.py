"""Rows of data before they are tokenized: a Record names the file and row that it is from, and so does a BadRow.

A row that cannot be used is a value here, not an end: readers give it in the row's place, so that what comes after it
can still be read, and `BadRows` counts what is left out, in the order of the rows. What breaks a file as
a whole (a truncated archive, a damaged parquet file) is a DataError, which nothing reads past.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llmq.errors import DataError


@dataclass(frozen=True)
class Record:
    """A row: `place` is "FILE:ROW", counted from 1, for messages; `value` its fields."""

    place: str
    value: dict[str, Any]


class BadRow(DataError):
    """A row that cannot be used, where it is and why; as many as --skip-bad-rows says may be left out."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place, self.reason = place, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return BadRow, (self.place, self.reason)


Row = Record | BadRow


class BadRows:
    """The rows left out so far, in the order of the data."""

    def __init__(self, allowed: int, count: int = 0) -> None:
        self.allowed, self.count = allowed, count

    def add(self, row: BadRow) -> None:
        """Leaves out one more; DataError for the first that is too many."""
        self.count += 1
        if self.count > self.allowed:
            before = f"; {self.allowed} before it left out" if self.allowed else ""
            raise DataError(f"{row}: fix the row, or leave out up to N such rows with --skip-bad-rows N{before}")


@contextmanager
def all_problems() -> Iterator[list[str]]:
    """A list of problems, which are raised as one DataError at the end."""
    problems: list[str] = []
    yield problems
    if problems:
        raise DataError("\n".join(problems))


@contextmanager
def noted(problems: list[str]) -> Iterator[None]:
    """Adds a DataError to `problems`, so that what follows is looked at too."""
    try:
        yield
    except DataError as error:
        problems.append(str(error))
