"""Sequences of rows: files one after the other, shuffled, or several mixed. All are streams (llmq/data/stream.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

import numpy as np

from llmq.data.rows.row_files import File, JsonLine, Row
from llmq.data.stream import START, Position
from llmq.errors import DataError, UsageError

DRAWN_AT_ONCE = 1000  # choices of the source of a row, as Hugging Face's datasets draws them


class RowSequence:
    """Rows in an order of their own."""

    def unparsed(self, position: Position = START) -> Iterator[tuple[Position, Row | JsonLine]]:
        """Each row, with the position after it; some may still have to be parsed."""
        raise NotImplementedError

    def read(self, position: Position = START) -> Iterator[tuple[Position, Row]]:
        """Each row, with the position after it."""
        return ((after, parsed(row)) for after, row in self.unparsed(position))

    def identity(self) -> Any:
        """What they depend on, as JSON; files of this machine are read whole for it."""
        raise NotImplementedError


def parsed(row: Row | JsonLine) -> Row:
    """A row itself."""
    return row() if isinstance(row, JsonLine) else row


@dataclass(frozen=True)
class FileRows(RowSequence):
    """The rows [start, stop) of all of `files`, or a share of them. A position is (file, row in it, row of all).

    Of n rows floor(n * fraction) are held out, spread evenly; `is_held` says which side a `share` is.
    """

    files: tuple[File, ...]
    start: int = 0
    stop: int | None = None
    share: tuple[Fraction, bool] | None = None  # fraction, is_held

    def unparsed(self, position: Position = START) -> Iterator[tuple[Position, Row | JsonLine]]:
        first, row, before = position or (0, 0, 0)
        before -= row  # rows of the files before this one
        for number in range(first, len(self.files)):
            if self.stop is not None and before >= self.stop:
                return
            with self.files[number].fetched() as file:
                at = None
                for at, read in file.rows(max(row, self.start - before)):
                    overall = before + at
                    if self.stop is not None and overall >= self.stop:
                        return
                    if self.has(overall - self.start):
                        yield (number, at + 1, overall + 1), read if isinstance(read, JsonLine) else read()
                before += file.num_rows() if at is None else at + 1
            row = 0

    def has(self, index: int) -> bool:
        """Whether the share has the row with this number, from 0."""
        if self.share is None:
            return True
        (part, whole), is_held = self.share[0].as_integer_ratio(), self.share[1]
        return ((index + 1) * part // whole > index * part // whole) == is_held

    def identity(self) -> Any:
        share = [str(self.share[0]), self.share[1]] if self.share else None
        return {"files": [f.identity() for f in self.files], "start": self.start, "stop": self.stop, "share": share}


@dataclass(frozen=True)
class Shuffled(RowSequence):
    """Rows of a small set in the order `order`, which counts from 0: all of them are held in memory."""

    rows: RowSequence
    order: tuple[int, ...]

    def unparsed(self, position: Position = START) -> Iterator[tuple[Position, Row | JsonLine]]:
        (first,) = position or (0,)
        everything = [row for _, row in self.rows.unparsed()]
        for number in range(first, len(self.order)):
            yield (number + 1,), everything[self.order[number]]

    def identity(self) -> Any:
        return {"rows": self.rows.identity(), "order": list(self.order)}


def train_test_order(num_rows: int, num_test: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which rows train and which test, as `train_test_split` of Hugging Face's datasets draws them."""
    order = np.random.default_rng(seed).permutation(num_rows).tolist()
    return tuple(order[num_test:]), tuple(order[:num_test])


@dataclass(frozen=True)
class Mixed(RowSequence):
    """Rows of several sequences, each row drawn from one of them by its weight, until all have ended once.

    The draws are those of `interleave_datasets(..., stopping_strategy="all_exhausted")` in Hugging Face's datasets: a
    sequence that has ended starts over. A position is the number of draws, and for each sequence whether it has ended
    and its position.
    """

    parts: tuple[RowSequence, ...]
    weights: tuple[float, ...]
    seed: int

    def unparsed(self, position: Position = START) -> Iterator[tuple[Position, Row | JsonLine]]:
        drawn, *lists = position or (0, [False] * len(self.parts), [START] * len(self.parts))
        ended, places = map(list, lists)
        readers = [part.unparsed(place) for part, place in zip(self.parts, places, strict=True)]
        ahead = [next(reader, None) for reader in readers]
        if None in ahead:
            raise DataError(f"part {ahead.index(None) + 1} of the data set has no rows: take it out of the mixture")
        for source in self._draws(drawn):
            if all(ended):
                return
            drawn += 1
            places[source], row = cast(tuple[Position, Row | JsonLine], ahead[source])
            ahead[source] = next(readers[source], None)
            if ahead[source] is None:
                ended[source], places[source] = True, START
                readers[source] = self.parts[source].unparsed()
                ahead[source] = next(readers[source])
            yield (drawn, tuple(ended), tuple(places)), row

    def identity(self) -> Any:
        return {"parts": [part.identity() for part in self.parts], "weights": list(self.weights), "seed": self.seed}

    def _draws(self, skipped: int) -> Iterator[int]:
        draw = np.random.default_rng(self.seed)
        weights = np.array(self.weights) / sum(self.weights)
        while True:
            block = draw.choice(len(self.parts), size=DRAWN_AT_ONCE, p=weights).tolist()
            yield from block[skipped:]
            skipped = max(skipped - DRAWN_AT_ONCE, 0)


def sliced(files: Sequence[File], borders: tuple[str, str]) -> FileRows:
    """The rows of `files` between borders, which count from the end where they are negative.

    The rows are counted if the borders need it; percents go to the nearest row. UsageError if there are none.
    """
    needs_count = any("%" in border or "-" in border for border in borders)
    count = count_rows(files) if needs_count else sys.maxsize
    start, stop = (
        round(int(border[:-1]) * count / 100) if border.endswith("%") else int(border) if border else None
        for border in borders
    )
    first, end, _ = slice(start, stop).indices(count)
    if end <= first:
        raise UsageError(f"the slice [{':'.join(borders)}] has no rows: its end must be after its start")
    return FileRows(tuple(files), first, end if stop is not None else None)


def count_rows(files: Sequence[File]) -> int:
    """How many rows there are in all, which fetches every file."""
    total = 0
    for file in files:
        with file.fetched() as local:
            total += local.num_rows()
    return total
