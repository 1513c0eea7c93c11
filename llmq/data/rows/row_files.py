"""Files of rows: JSON lines, JSON arrays, CSV and parquet, read in one pass from any row on.

Memory is bounded, except that an array is held whole. Compressed files are decompressed as they are read.

A row that cannot be used is a value here, not an end: it comes in the row's place, so that what follows can still be
read, and `BadRows` counts what is left out, in the order of the rows. What breaks a file as a whole (a truncated
archive, a damaged parquet file) is a DataError, which nothing reads past.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from llmq.data.tokens.cache import content_hash
from llmq.errors import DataError

SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
}  # fmt: skip
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
MAX_ROW_BYTES = 1 << 26  # a longer row would be held in memory some ten times over
MAX_JSON_BYTES = 1 << 32  # of an array, decompressed
BLOCK_BYTES = 1 << 20
PARQUET_ROWS = 256  # in memory at once; fewer where they are long:
PARQUET_BYTES = 1 << 25  # by the mean of their row group
# What pyarrow raises for a damaged file, and for a date or number that Python cannot hold.
DAMAGES = (ValueError, KeyError, NotImplementedError, RuntimeError, MemoryError, OverflowError, TypeError)
Line = TypeVar("Line", bytes, str)


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


@dataclass(frozen=True, slots=True)
class JsonLine:
    """A row of a file of JSON lines, as its bytes: calling it parses them, in whichever process that is."""

    place: str
    line: bytes

    def __call__(self) -> Row:
        try:
            text = self.line.decode("utf-8-sig").strip()
            return as_row(self.place, json.loads(text) if text else {})
        except UnicodeDecodeError as error:
            byte, at = self.line[error.start], error.start
            return BadRow(self.place, f"not UTF-8: byte {at} of the row is 0x{byte:02x} ({error.reason})")
        except (RecursionError, ValueError) as error:
            return BadRow(self.place, f"not JSON ({error})")


Located = tuple[int, Callable[[], Row]]  # a row's number from 0, and what reads it


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


class _Broken(Exception):
    """What breaks a file at the row after the last one found, with the way out."""


@dataclass(frozen=True)
class RowFile:
    """A file of rows; `name` is how messages call it, `kind` jsonl, json, csv or parquet."""

    path: Path
    name: str
    kind: str
    delimiter: str = ","

    @classmethod
    def of(cls, path: Path, name: str | None = None) -> RowFile | None:
        """The file as its suffix says, or None where that is none of a file of rows."""
        plain = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
        kind = SUFFIXES.get(plain.suffix.lower())
        if kind is None or (kind == "parquet" and plain != path):
            return None
        return cls(path, name or str(path), kind, "\t" if plain.suffix.lower() == ".tsv" else ",")

    def fetched(self) -> AbstractContextManager[RowFile]:
        """Itself: it is on this machine."""
        return nullcontext(self)

    def identity(self) -> Any:
        """What its rows depend on, as JSON."""
        return [self.kind, self.delimiter, content_hash(self.path)]

    def rows(self, start: int = 0) -> Iterator[Located]:
        """Each row from `start` on; DataError where the file itself cannot be read."""
        at = -1
        try:
            for at, read in _FINDERS[self.kind](self, start):
                if at >= start:
                    yield at, read
        except DataError:
            raise
        except _Broken as error:
            raise DataError(f"{self.place(at + 1)}: {error}") from None
        except (OSError, *DAMAGES) as error:
            if self.kind != "parquet" and not isinstance(error, OSError):
                raise  # only pyarrow says with all of these that a file is damaged
            where, fix = self.name if at < 0 else self.place(at + 1), "check the file and the disk, or get it again"
            raise DataError(f"{where}: cannot be read ({_said(error)}): {fix}") from None

    def num_rows(self) -> int:
        """How many rows the file has; parquet files say it without being read."""
        if self.kind == "parquet":
            with _open_parquet(self) as opened:
                return int(opened.metadata.num_rows)
        return sum(1 for _ in self.rows())

    def place(self, row: int) -> str:
        return f"{self.name}:{row + 1}"

    def opened(self) -> IO[bytes]:
        """The decompressed bytes."""
        if compression := COMPRESSIONS.get(self.path.suffix.lower()):
            import pyarrow

            stream: Any = pyarrow.input_stream(str(self.path), compression=compression)
            return io.BufferedReader(stream, BLOCK_BYTES)
        return self.path.open("rb", BLOCK_BYTES)


def _said(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]


def _limited(opened: IO[Line]) -> Iterator[Line]:
    """The lines of a file, each of which has at most MAX_ROW_BYTES."""
    while line := opened.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES:
            raise _Broken(f"the row is longer than {MAX_ROW_BYTES}: split it, or check its quotes")
        yield line


def _json_lines(file: RowFile, start: int) -> Iterator[Located]:
    with file.opened() as opened:
        for row, line in enumerate(_limited(opened)):
            yield row, JsonLine(file.place(row), line)


def as_row(place: str, value: Any) -> Row:
    """A value as the row at `place`: an object with fields, or what is wrong with it."""
    if not isinstance(value, dict):
        return BadRow(place, f"{kind_of(value)}, where a row is an object with fields")
    return Record(place, value) if value else BadRow(place, "the row is empty")


def kind_of(value: Any) -> str:
    """What a value is, in JSON's words."""
    kinds = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number", str: "text"}
    return "null" if value is None else kinds.get(type(value), "something else")


def _json_array(file: RowFile, start: int) -> Iterator[Located]:
    content = bytearray()
    with file.opened() as opened:
        while block := opened.read(BLOCK_BYTES):
            content += block
            if len(content) > MAX_JSON_BYTES:
                raise DataError(
                    f"{file.name}: an array of more than {MAX_JSON_BYTES} bytes, which would be in memory as a whole: "
                    "make a .jsonl file of it, with a row a line (jq -c '.[]')"
                )
    try:
        values = json.loads(content.decode("utf-8-sig"))
    except (RecursionError, ValueError) as error:  # with line and column, or the byte
        raise DataError(f"{file.name}: not JSON ({error}): a file with a row a line is .jsonl") from None
    if not isinstance(values, list):
        raise DataError(f"{file.name}: not an array of rows ([{{...}}, ...]): a file with a row a line is .jsonl")
    for row, value in enumerate(values):
        yield row, partial(as_row, file.place(row), value)


def _csv(file: RowFile, start: int) -> Iterator[Located]:
    """Bytes that are not UTF-8 become surrogates, which spoil the rows that use them."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with io.TextIOWrapper(file.opened(), "utf-8-sig", "surrogateescape", newline="") as opened:
        rows = csv.reader(_limited(opened), delimiter=file.delimiter, strict=True)
        try:
            if (header := next(rows, None)) is None:
                return
            if not any(header) or (twice := _twice(header)):
                bad = f"{twice} appears twice" if any(header) else "it is empty"
                raise DataError(f"{file.name}: the first line names the fields, but {bad}: fix it")
            for row, fields in enumerate(rows):
                yield row, partial(_csv_row, file.place(row), header, fields)
        except csv.Error as error:
            raise _Broken(f"not CSV ({error}): fix the row, or check its quotes") from None


def _csv_row(place: str, header: list[str], fields: list[str]) -> Row:
    if not any(fields):
        return BadRow(place, "the row is empty")
    if len(fields) != len(header):
        return BadRow(place, f"the header names {len(header)} fields, but the row has {len(fields)}")
    return Record(place, dict(zip(header, fields, strict=True)))


def _twice(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name, count in Counter(names).items() if count > 1)


def _open_parquet(file: RowFile) -> Any:
    import pyarrow.parquet

    try:  # column chunks are read in blocks and not whole: a row group of web text has a gigabyte
        return pyarrow.parquet.ParquetFile(
            str(file.path), buffer_size=BLOCK_BYTES, pre_buffer=False, page_checksum_verification=True
        )
    except (OSError, *DAMAGES) as error:
        raise DataError(f"{file.name}: not a parquet file that can be read ({_said(error)}): get it again") from None


def _parquet(file: RowFile, start: int) -> Iterator[Located]:
    row = 0
    with _open_parquet(file) as opened:
        if twice := _twice(opened.schema_arrow.names):
            raise DataError(f"{file.name}: among the names of the columns, {twice} appears twice: rename or drop one")
        for number in range(opened.metadata.num_row_groups):
            group = opened.metadata.row_group(number)
            if row + group.num_rows <= start:
                row += group.num_rows
                continue
            mean = group.total_byte_size // max(group.num_rows, 1)
            at_once = min(max(PARQUET_BYTES // max(mean, 1), 1), PARQUET_ROWS)
            for batch in opened.iter_batches(at_once, row_groups=[number], use_threads=False):
                for offset in range(batch.num_rows):
                    yield row, partial(_parquet_row, file.place(row), batch, offset)
                    row += 1


def _parquet_row(place: str, batch: Any, offset: int) -> Row:
    try:
        value = {name: batch.column(i)[offset].as_py() for i, name in enumerate(batch.schema.names)}
    except DAMAGES as error:
        return BadRow(place, f"a value that cannot be read ({_said(error)})")
    is_empty = all(field is None for field in value.values())
    return BadRow(place, "the row is empty") if is_empty else Record(place, value)


# The rows of a file of each kind, at least those from `start` on.
_FINDERS: dict[str, Callable[[RowFile, int], Iterator[Located]]] = {
    "jsonl": _json_lines, "json": _json_array, "csv": _csv, "parquet": _parquet,
}  # fmt: skip


class OpenFile(Protocol):
    """The rows of a file that is on this machine, each with its number from 0."""

    def rows(self, start: int = 0) -> Iterator[Located]: ...
    def num_rows(self) -> int: ...


class File(Protocol):
    """A file of rows, here or to be fetched, or what is read like one."""

    def fetched(self) -> AbstractContextManager[OpenFile]: ...
    def identity(self) -> Any: ...
