"""Sequences of rows go on from any position; shuffles and mixtures are those of Hugging Face's datasets."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.data.rows.hub_data import HubSpec
from llmq.data.rows.row_files import FileRows, HeldShare, Mixed, Record, RowFile, Shuffled, sliced, train_test_order
from llmq.data.stream import START, Position
from llmq.errors import DataError, UsageError

# interleave_datasets of datasets 5.2.0 on three sets of 3, 5 and 9 rows, with these probabilities, seed 42 and
# stopping_strategy="all_exhausted": (set, row).
WEIGHTS = (0.2, 0.3, 0.5)
MIXED = [
    (2, 0), (1, 0), (2, 1), (2, 2), (0, 0), (2, 3), (2, 4), (2, 5), (0, 1),
    (1, 1), (1, 2), (2, 6), (2, 7), (2, 8), (1, 3), (1, 4), (2, 0), (0, 2),
]  # fmt: skip
# train_test_split(test_size=4, seed=42) of datasets 5.2.0 on 17 rows.
TRAIN, TEST = ((10, 9, 7, 3, 0, 15, 5, 2, 4, 14, 1, 13, 8), (12, 16, 11, 6))


@dataclass(frozen=True)
class Counted:
    """Rows {set, row} of a set of `count`."""

    number: int
    count: int

    def read(self, position: Position = START) -> Iterator[tuple[Position, Record]]:
        for row in range(position[0] if position else 0, self.count):
            yield (row + 1,), Record(f"set {self.number}:{row + 1}", {"set": self.number, "row": row})

    def identity(self) -> Any:
        return [self.number, self.count]


def files_of(folder: Path, counts: list[int]) -> tuple[RowFile, ...]:
    """Files of so many rows, which are numbered through."""
    made, number = [], 0
    for index, count in enumerate(counts):
        path = folder / f"{index}.jsonl"
        path.write_text("".join(json.dumps({"n": number + row}) + "\n" for row in range(count)))
        number += count
        file = RowFile.of(path)
        assert file is not None
        made.append(file)
    return tuple(made)


def numbers(rows: Any, position: Position = START) -> list[int]:
    return [row.value["n"] for _, row in rows.read(position)]


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    start=st.integers(0, 12),
    length=st.none() | st.integers(1, 12),
    fraction=st.none() | st.fractions(Fraction(1, 10), Fraction(9, 10), max_denominator=10),
    held=st.booleans(),
)
def test_files_go_on_from_every_position(tmp_path_factory, counts, start, length, fraction, held) -> None:
    stop = None if length is None else start + length
    share = None if fraction is None else HeldShare(fraction, held)
    rows = FileRows(files_of(tmp_path_factory.mktemp("files"), counts), start, stop, share)
    every = list(range(sum(counts)))[start:stop]
    wanted = [n for n in every if share is None or share.has(n - start)]
    assert numbers(rows) == wanted
    for count, (position, _) in enumerate(list(rows.read()), 1):
        assert numbers(rows, position) == wanted[count:]


@given(st.fractions(0, Fraction(99, 100), max_denominator=1000), st.integers(0, 300))
def test_a_share_is_exact_and_its_sides_are_all_rows(fraction: Fraction, count: int) -> None:
    held = [n for n in range(count) if HeldShare(fraction, True).has(n)]
    assert len(held) == count * fraction.numerator // fraction.denominator
    assert sorted(held + [n for n in range(count) if HeldShare(fraction, False).has(n)]) == list(range(count))


def test_a_mixture_is_that_of_datasets_and_goes_on_from_every_position() -> None:
    rows = Mixed((Counted(0, 3), Counted(1, 5), Counted(2, 9)), WEIGHTS, 42)
    found = list(rows.read())
    assert [(row.value["set"], row.value["row"]) for _, row in found] == MIXED  # type: ignore[union-attr]
    for count, (position, _) in enumerate(found, 1):
        rest = [row for _, row in rows.read(tuple(json.loads(json.dumps(position))))]
        assert rest == [row for _, row in found[count:]]


def test_a_mixture_goes_on_behind_many_draws() -> None:
    found = list((rows := Mixed((Counted(0, 4000), Counted(1, 1000)), (0.8, 0.2), 7)).read())
    for count in (999, 1000, 1001, 2000, 3500):
        assert next(iter(rows.read(found[count - 1][0]))) == found[count]


def test_a_mixture_of_nothing_is_named() -> None:
    with pytest.raises(DataError, match="part 2 of the data set has no rows"):
        next(iter(Mixed((Counted(0, 3), Counted(1, 0)), (1, 1), 0).read()))


def test_drawn_rows_are_those_of_datasets() -> None:
    assert train_test_order(17, 4, 42) == (TRAIN, TEST)
    rows = Shuffled(Counted(0, 17), TRAIN)
    found = list(rows.read())
    assert [row.value["row"] for _, row in found] == list(TRAIN)  # type: ignore[union-attr]
    assert list(rows.read(found[4][0])) == found[5:]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("train[:10%]", (0, 2)), ("train[10%:20%]", (2, 3)), ("train[-10%:]", (15, 17)), ("train[:-15]", (0, 2)),
        ("train[3:5]", (3, 5)), ("train[16:]", (16, 17)), ("train[:100%]", (0, 17)), ("train[:99]", (0, 17)),
        ("train[:13%]", (0, 2)), ("train[:15%]", (0, 3)), ("train[:]", (0, 17)), ("train", (0, 17)),
    ],
)  # fmt: skip
def test_slices_are_those_of_datasets(tmp_path: Path, text: str, wanted: tuple[int, int]) -> None:
    """Percents go to the nearest row, as `load_dataset(..., split=text)` has it."""
    spec, files = HubSpec.parse(f"org/name::{text}"), files_of(tmp_path, [10, 7])
    assert spec.split == "train"
    assert numbers(sliced(files, spec.borders)) == list(range(*wanted))


@pytest.mark.parametrize(
    "text", ["train[", "train[1]", "[1:2]", "train[a:b]", "train[:101%]", "train[:1.5%]", "t[1:2]x"]
)
def test_what_is_no_slice(text: str) -> None:
    with pytest.raises(UsageError, match=r"is neither a path nor a data set of the Hub: .* a slice"):
        HubSpec.parse(f"org/name::{text}")


def test_a_slice_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\[5:5\] has no rows"):
        sliced(files_of(tmp_path, [9]), ("5", "5"))


def test_what_is_not_there_yet_decides_nothing(tmp_path: Path) -> None:
    """The identity is that of the content: not of the place, but of everything that decides on the rows."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = (FileRows(files_of(tmp_path / name, [5, 6])) for name in ("one", "two"))
    assert one.identity() == two.identity()
    assert (
        one.identity()
        != FileRows(one.files, 1).identity()
        != FileRows(one.files, share=HeldShare(Fraction(1, 2), True))
    )
    files_of(tmp_path / "two", [6, 5])
    assert one.identity() != two.identity()
