"""Files of rows: JSON lines, JSON arrays, CSV and parquet, read in one pass from any row on.

Memory is bounded, except that the text of an array is held whole.

Every reader yields (row, Record or BadRow) for the wanted rows, where `row` counts from 0 and the place in messages
from 1, and returns the number of rows of the file. Compressed files are decompressed as they are read.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from llmq.data.rows.records import BadRow, Record, Row
from llmq.data.tokens.cache import content_hash
from llmq.errors import DataError

SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
}  # fmt: skip
COMPRESSIONS = (".gz", ".zst")
MAX_ROW_BYTES = 1 << 26  # a longer row would be held in memory some ten times over
MAX_JSON_BYTES = 1 << 32  # of an array, decompressed
BLOCK_BYTES = 1 << 20
PARQUET_ROWS = 256  # in memory at once; fewer where they are long:
PARQUET_BYTES = 1 << 25  # by the mean of their row group
BOM = b"\xef\xbb\xbf"

Wanted = Callable[[int], bool]
Rows = Generator[tuple[int, Row], None, int]


@dataclass(frozen=True)
class RowFile:
    """A file of rows; `name` is how messages call it, `kind` jsonl, json, csv or parquet."""

    path: Path
    name: str
    kind: str
    delimiter: str = ","
    is_here: ClassVar[bool] = True

    @classmethod
    def of(cls, path: Path, name: str | None = None) -> RowFile | None:
        """The file as its suffix says, or None where that is none of a file of rows."""
        plain = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
        kind = SUFFIXES.get(plain.suffix.lower())
        if kind is None or (kind == "parquet" and plain != path):
            return None
        return cls(path, name or str(path), kind, "\t" if plain.suffix.lower() == ".tsv" else ",")

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def fetched(self) -> AbstractContextManager[RowFile]:
        """Itself: it is on this machine."""
        return nullcontext(self)

    def identity(self) -> Any:
        """What its rows depend on, as JSON."""
        return [self.kind, self.delimiter, content_hash(self.path)]

    def rows(self, start: int = 0, wanted: Wanted = lambda row: True) -> Rows:
        """The wanted rows from row `start` on; DataError where the file itself cannot be read."""
        return (_read_parquet if self.kind == "parquet" else _read_text)(self, start, wanted)

    def num_rows(self) -> int:
        """How many rows the file has; parquet files say it without being read."""
        if self.kind == "parquet":
            with _container(_At(self)):
                return _open_parquet(self).metadata.num_rows
        rows = self.rows(wanted=lambda row: False)
        while True:
            try:
                next(rows)
            except StopIteration as end:
                return cast(int, end.value)

    def place(self, row: int) -> str:
        return f"{self.name}:{row + 1}"


class _At:
    """Where a reader is, for the message of what breaks the file."""

    def __init__(self, file: RowFile) -> None:
        self.file = file
        self.row: int | None = None

    def __str__(self) -> str:
        return self.file.name if self.row is None else self.file.place(self.row)


@contextmanager
def _container(at: _At) -> Iterator[None]:
    """Turns what breaks a file as a whole into a DataError that names it and the row."""
    try:
        yield
    except DataError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{at}: the compressed file is truncated or damaged ({error}): get it again") from None
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise DataError(f"{at}: cannot be read ({reason}): check the file and the disk, or get it again") from None
    except (ValueError, KeyError, NotImplementedError, RuntimeError, MemoryError, OverflowError, TypeError) as error:
        if at.file.kind != "parquet":  # only pyarrow says with all of these that a file is damaged
            raise
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{at}: not a parquet file that can be read ({said}): get it again") from None


def _open(file: RowFile) -> BinaryIO:
    """The decompressed bytes, without a byte order mark."""
    suffix = file.path.suffix.lower()
    if suffix == ".gz":
        opened: Any = gzip.GzipFile(file.path, "rb")
    elif suffix == ".zst":
        import pyarrow

        opened = io.BufferedReader(pyarrow.input_stream(str(file.path), compression="zstd"), BLOCK_BYTES)
    else:
        opened = file.path.open("rb", BLOCK_BYTES)
    try:
        with _container(_At(file)):
            if opened.peek(len(BOM))[: len(BOM)] == BOM:
                opened.read(len(BOM))
    except BaseException:
        opened.close()
        raise
    return cast(BinaryIO, opened)


def _read_text(file: RowFile, start: int, wanted: Wanted) -> Rows:
    """Finds the rows one after the other, and parses those that are wanted."""
    at = _At(file)
    find, parse = _TEXT_KINDS[file.kind]
    with _container(at), _open(file) as opened:
        for row, found in enumerate(find(file, opened)):
            at.row = row
            if row >= start and wanted(row):
                yield row, parse(file.place(row), *found)
        return 0 if at.row is None else at.row + 1


def _lines(file: RowFile, opened: BinaryIO) -> Iterator[tuple[bytes]]:
    row = 0
    while line := opened.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES:
            raise DataError(f"{file.place(row)}: the row is longer than {MAX_ROW_BYTES} bytes: split it")
        yield (line,)
        row += 1


def _json_row(place: str, line: bytes) -> Row:
    try:
        text = line.decode().rstrip()
        if not text:
            return BadRow(place, "the row is empty")
        return _object(place, json.loads(text), "\\u" in text)
    except UnicodeDecodeError as error:
        return BadRow(place, f"not UTF-8: byte {error.start} of the row is 0x{line[error.start]:02x} ({error.reason})")
    except RecursionError:
        return BadRow(place, "not JSON that can be read: nested too deeply")
    except json.JSONDecodeError as error:
        return BadRow(place, f"not JSON ({error.msg} at character {error.pos + 1})")
    except ValueError as error:  # a number of too many digits
        return BadRow(place, f"not JSON ({error})")


def _object(place: str, value: Any, escaped: bool) -> Row:
    if not isinstance(value, dict):
        kind = {list: "an array", str: "text", bool: "true or false", type(None): "null"}.get(type(value), "a number")
        return BadRow(place, f"{kind}, where a row is an object with fields")
    if not value:
        return BadRow(place, "the row is empty")
    try:
        whole = not escaped or _is_text(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return BadRow(place, "nested too deeply")
    if not whole:
        return BadRow(place, "the text has half of a surrogate pair (\\ud800 to \\udfff), which is not a character")
    return Record(place, value)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_WHITE = re.compile(r"[ \t\n\r]*")


def _json_values(file: RowFile, opened: BinaryIO) -> Iterator[tuple[Any, bool]]:
    """The objects of an array, and whether each has escapes. After what is not JSON no next row can be found.

    The text is in memory as a whole, but only one of its rows as objects, which are several times larger.
    """
    text, row = _whole_text(file, opened), 0

    def mark(at: int) -> tuple[str, int]:
        """The next character that is not white space, or nothing at the end, and where it is."""
        at = cast(re.Match[str], _WHITE.match(text, at)).end()
        return text[at : at + 1], at

    opening, at = mark(0)
    if opening != "[":
        raise DataError(f"{file.name}: not an array of rows ([{{...}}, ...]): a file with a row a line is .jsonl")
    following, at = mark(at + 1)
    while following != "]":
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except RecursionError:
            raise DataError(f"{file.place(row)}: nested too deeply: fix the row") from None
        except ValueError as error:  # with line and column
            raise DataError(f"{file.place(row)}: not JSON ({error}): fix the row") from None
        if end - at > MAX_ROW_BYTES:
            raise DataError(f"{file.place(row)}: the row is longer than {MAX_ROW_BYTES} characters: fix or split it")
        yield value, text.find("\\u", at, end) >= 0
        following, at = mark(end)
        if following == ",":
            _, at = mark(at + 1)
            row += 1
        elif following != "]":
            what = repr(following) if following else "the end of the file"
            raise DataError(f"{file.place(row)}: no comma or closing bracket after the row, but {what}: fix the file")
    if rest := mark(at + 1)[0]:
        raise DataError(f"{file.name}: {rest!r} after the array's end: fix the file")


def _whole_text(file: RowFile, opened: BinaryIO) -> str:
    content = bytearray()
    while block := opened.read(BLOCK_BYTES):
        content += block
        if len(content) > MAX_JSON_BYTES:
            raise DataError(
                f"{file.name}: an array of more than {MAX_JSON_BYTES} bytes, which would be in memory as a whole: make "
                "a .jsonl file of it, with a row a line (jq -c '.[]')"
            )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise DataError(f"{file.name}: not UTF-8: byte {error.start} is 0x{byte:02x} ({error.reason})") from None


def _csv_records(file: RowFile, opened: BinaryIO) -> Iterator[tuple[list[str], list[str]]]:
    """The header with the fields' names, and the fields of each row. Bytes that are not UTF-8 spoil only their row."""
    csv.field_size_limit(MAX_ROW_BYTES)
    text = io.TextIOWrapper(opened, "utf-8", "surrogateescape", newline="")
    row, left, header = -1, MAX_ROW_BYTES, list[str]()  # the header comes before row 0; characters that a row may have

    def lines() -> Iterator[str]:
        nonlocal left
        while line := text.readline(left + 1):
            left -= len(line)
            if left < 0:  # in one of the many lines that a row may have
                raise DataError(
                    f"{file.name if row < 0 else file.place(row)}: the row is longer than {MAX_ROW_BYTES} characters: "
                    "split it, or check its quotes"
                )
            yield line

    rows = csv.reader(lines(), delimiter=file.delimiter, strict=True)
    while True:
        try:
            fields = next(rows, None)
        except csv.Error as error:
            where = f"{file.name}: the header" if row < 0 else file.place(row)
            raise DataError(f"{where}: not CSV ({error}): fix the row, or check its quotes") from None
        if fields is None:
            return
        if row >= 0:
            yield header, fields
        elif bad := _bad_header(fields):
            raise DataError(f"{file.name}: the first line names the fields, but {bad}: fix it")
        else:
            header = fields
        row, left = row + 1, MAX_ROW_BYTES


def _bad_header(header: list[str]) -> str:
    if not header or not any(header):
        return "it is empty"
    if not _is_text("".join(header)):
        return "it is not UTF-8"
    return _named_twice(header)


def _named_twice(names: Sequence[str]) -> str:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    return f"{', '.join(map(repr, twice[:5]))} appears twice" if twice else ""


def _csv_row(place: str, header: list[str], fields: list[str]) -> Row:
    if not any(fields):
        return BadRow(place, "the row is empty")
    if len(fields) != len(header):
        return BadRow(place, f"the header names {len(header)} fields, but the row has {len(fields)}")
    for name, text in zip(header, fields, strict=True):
        if not text.isascii() and not _is_text(text):
            return BadRow(place, f"not UTF-8: field {name!r}")
    return Record(place, dict(zip(header, fields, strict=True)))


def _open_parquet(file: RowFile) -> Any:
    import pyarrow.parquet

    # Column chunks are read in blocks and not whole: a row group of web text has a gigabyte.
    return pyarrow.parquet.ParquetFile(
        str(file.path), buffer_size=BLOCK_BYTES, pre_buffer=False, page_checksum_verification=True
    )


def _read_parquet(file: RowFile, start: int, wanted: Wanted) -> Rows:
    at = _At(file)
    with _container(at), _open_parquet(file) as opened:
        if twice := _named_twice(opened.schema_arrow.names):
            raise DataError(f"{file.name}: among the names of the columns, {twice}: rename or drop one")
        row, groups = 0, list(range(opened.metadata.num_row_groups))
        while groups and row + opened.metadata.row_group(groups[0]).num_rows <= start:
            row += opened.metadata.row_group(groups.pop(0)).num_rows
        if not groups:
            return cast(int, opened.metadata.num_rows)
        at.row = row
        for group in groups:
            at_once = _rows_at_once(opened.metadata.row_group(group))
            for batch in opened.iter_batches(at_once, row_groups=[group], use_threads=False):
                for offset in range(batch.num_rows):
                    if row >= start and wanted(row):
                        yield row, _parquet_row(file.place(row), batch, offset)
                    row += 1
                    at.row = row
        return row


def _rows_at_once(group: Any) -> int:
    """How many rows of a row group have about PARQUET_BYTES, by their mean."""
    mean = group.total_byte_size // max(group.num_rows, 1)
    return min(max(PARQUET_BYTES // max(mean, 1), 1), PARQUET_ROWS)


def _parquet_row(place: str, batch: Any, offset: int) -> Row:
    try:
        value = {name: batch.column(i)[offset].as_py() for i, name in enumerate(batch.schema.names)}
    except UnicodeDecodeError as error:
        return BadRow(place, f"not UTF-8: {error.reason}")
    except (ValueError, OverflowError, KeyError) as error:  # a date or number that Python cannot hold
        return BadRow(place, f"a value that cannot be read ({error})")
    if all(field is None for field in value.values()):
        return BadRow(place, "the row is empty")
    return Record(place, value)


# How the rows of a kind are found, and what makes a row of one that was found, given its place.
_TEXT_KINDS: dict[str, tuple[Callable[[RowFile, BinaryIO], Iterator[tuple[Any, ...]]], Callable[..., Row]]] = {
    "jsonl": (_lines, _json_row), "json": (_json_values, _object), "csv": (_csv_records, _csv_row),
}  # fmt: skip
