"""Sequences of rows that can be entered anywhere: files one after the other, shuffled, or several mixed.

All are streams (see llmq/data/stream.py).
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, cast

import numpy as np

from llmq.data.rows.hub_data import HubFile
from llmq.data.rows.row_files import Row, RowFile
from llmq.data.stream import START, Position, Stream
from llmq.errors import DataError, UsageError

DRAWN_AT_ONCE = 1000  # choices of the source of a row, as Hugging Face's datasets draws them


class RowSequence(Stream[Row], Protocol):
    """Rows in an order of their own."""

    def identity(self) -> Any:
        """What the rows depend on, as JSON; reads files of this machine whole."""
        ...


File = RowFile | HubFile  # one of this machine, or one that has to be fetched


@dataclass(frozen=True)
class HeldShare:
    """Part of the rows: floor(n * fraction) of n are held out, spread evenly; `held` says which side is meant."""

    fraction: Fraction
    held: bool

    def has(self, index: int) -> bool:
        """Whether the row with this number (from 0) belongs to the share."""
        ours = (index + 1) * self.fraction.numerator // self.fraction.denominator
        return (ours > index * self.fraction.numerator // self.fraction.denominator) == self.held


@dataclass(frozen=True)
class FileRows:
    """The rows [start, stop) of all of `files`, or a share of them. A position is (file, row in it, row of all)."""

    files: tuple[File, ...]
    start: int = 0
    stop: int | None = None
    share: HeldShare | None = None

    def read(self, position: Position = START) -> Iterator[tuple[Position, Row]]:
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
                    if self.share is None or self.share.has(overall - self.start):
                        yield (number, at + 1, overall + 1), read()
                before += file.num_rows() if at is None else at + 1
            row = 0

    def about(self) -> int:
        """About how many rows there are. Of files that must be fetched, the first is, and speaks for the others."""
        if all(file.is_here for file in self.files):
            total = count_rows(self.files)
        else:
            total = count_rows(self.files[:1]) * sum(file.size for file in self.files) // max(self.files[0].size, 1)
        total = max((total if self.stop is None else min(total, self.stop)) - self.start, 0)
        if self.share is None:
            return total
        held = total * self.share.fraction.numerator // self.share.fraction.denominator
        return held if self.share.held else total - held

    def identity(self) -> Any:
        share = [str(self.share.fraction), self.share.held] if self.share else None
        return {"files": [f.identity() for f in self.files], "start": self.start, "stop": self.stop, "share": share}


@dataclass(frozen=True)
class Shuffled:
    """Rows of a small set in the order `order`, which counts from 0: all of them are held in memory."""

    rows: RowSequence
    order: tuple[int, ...]

    def read(self, position: Position = START) -> Iterator[tuple[Position, Row]]:
        (first,) = position or (0,)
        everything = [row for _, row in self.rows.read()]
        for number in range(first, len(self.order)):
            yield (number + 1,), everything[self.order[number]]

    def identity(self) -> Any:
        return {"rows": self.rows.identity(), "order": list(self.order)}


def train_test_order(num_rows: int, num_test: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which rows train and which test, as `train_test_split` of Hugging Face's datasets draws them."""
    order = np.random.default_rng(seed).permutation(num_rows).tolist()
    return tuple(order[num_test:]), tuple(order[:num_test])


@dataclass(frozen=True)
class Mixed:
    """Rows of several sequences, each row drawn from one of them by its weight, until all have ended once.

    The draws are those of `interleave_datasets(..., stopping_strategy="all_exhausted")` in Hugging Face's datasets: a
    sequence that has ended starts over. A position is the number of draws, and for each sequence whether it has ended
    and its position.
    """

    parts: tuple[RowSequence, ...]
    weights: tuple[float, ...]
    seed: int

    def read(self, position: Position = START) -> Iterator[tuple[Position, Row]]:
        drawn, ended, places = position or (0, [False] * len(self.parts), [START] * len(self.parts))
        ended, places = list(ended), list(places)
        readers = [part.read(place) for part, place in zip(self.parts, places, strict=True)]
        ahead = [next(reader, None) for reader in readers]
        if None in ahead:
            raise DataError(f"part {ahead.index(None) + 1} of the data set has no rows: take it out of the mixture")
        for source in self._draws(drawn):
            if all(ended):
                return
            drawn += 1
            places[source], row = cast(tuple[Position, Row], ahead[source])
            ahead[source] = next(readers[source], None)
            if ahead[source] is None:
                ended[source], places[source] = True, START
                readers[source] = self.parts[source].read()
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
