"""Files of rows: every kind read alike from any row, bad rows named in their place, broken files named as a whole.
Sequences of rows go on from any position; shuffles and mixtures are those of Hugging Face's datasets.
"""

import csv
import gzip
import io
import json
import random
import tracemalloc
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.data.rows import row_files
from llmq.data.rows.hub_data import HubSpec
from llmq.data.rows.row_files import BadRow, Record, RowFile
from llmq.data.rows.row_sequences import FileRows, Mixed, Shuffled, sliced, train_test_order
from llmq.data.stream import START, Position
from llmq.errors import DataError, UsageError

ROWS = [{"text": f'row {n}: \u00e9t\u00e9, "quotes"\nand \U0001f600', "n": str(n)} for n in range(700)]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=n % 2 == 0) + "\n" for n, row in enumerate(rows)).encode()


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def parquet(table: pa.Table) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, row_group_size=300, data_page_size=2000, write_page_checksum=True)
    return out.getvalue()


def zst(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def content(name: str, rows: list[dict[str, Any]]) -> bytes:
    """A file of rows of the kind that its name says; with a byte order mark and no line end where that says bom."""
    match opened(Path(name)):
        case RowFile(kind="jsonl"):
            made = jsonl(rows)
        case RowFile(kind="json"):
            made = json.dumps(rows, ensure_ascii=False, indent=1).encode()
        case RowFile(kind="csv", delimiter=delimiter):
            made = as_csv(rows, delimiter)
        case _:
            made = parquet(pa.Table.from_pylist(rows))
    made = b"\xef\xbb\xbf" + made.rstrip(b"\n") if name.startswith("bom") else made
    return gzip.compress(made) if name.endswith(".gz") else zst(made) if name.endswith(".zst") else made


TWICE = pa.table([["x"], ["y"]], names=["a", "a"])
SOME = ("a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz", "a.jsonl.zst")
KINDS = (*SOME, "a.ndjson", "a.JSONL.zst", "bom.jsonl", "a.json.gz", "a.tsv", "bom.csv.zst")


def opened(path: Path) -> RowFile:
    file = RowFile.of(path)
    assert file is not None
    return file


def rows_of(path: Path) -> list[Any]:
    return [read() for _, read in opened(path).rows()]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_same_rows_from_anywhere(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 100)  # rows go over the borders of what is read
    path = tmp_path / name
    path.write_bytes(content(name, ROWS))
    file = opened(path)
    assert [row.value for row in rows_of(path)] == ROWS
    assert rows_of(path)[6].place == f"{path}:7" and file.num_rows() == len(ROWS)
    for start in (0, 1, 299, 300, 301, 699, 700, 800):
        got = [(at, read()) for at, read in file.rows(start)]
        assert [at for at, _ in got] == list(range(start, len(ROWS)))
        assert all(row.value == ROWS[at] for at, row in got)


JSONL, CSV = (b'{"a": "1"}\n', b'\n{"a": "2"}\n'), (b"a,b\n1,\n", b"\n2,\n")


@pytest.mark.parametrize(
    ("around", "line", "says"),
    [
        (JSONL, b"", "the row is empty"),
        (JSONL, b"  \t", "the row is empty"),
        (JSONL, b"{}", "the row is empty"),
        (JSONL, b'{"text": "a"', "not JSON (Expecting ',' delimiter: line 1 column 13 (char 12))"),
        (JSONL, b'{"text": caf\xe9}', "not UTF-8: byte 12 of the row is 0xe9"),
        (JSONL, b"[1]", "a list, where a row is an object"),
        (JSONL, b"3", "a number, where"),
        (JSONL, b"null", "null, where"),
        (JSONL, b'"x"', "text, where"),
        (JSONL, b"true", "true or false, where"),
        (JSONL, b"[" * 100_000, "not JSON (maximum recursion depth"),
        (JSONL, b'{"n": ' + b"9" * 5000 + b"}", "not JSON (Exceeds the limit"),
        (CSV, b"1", "names 2 fields, but the row has 1"),
        (CSV, b"1,2,3", "the row has 3"),
        (CSV, b'"",', "the row is empty"),
        (CSV, b"", "is empty"),
    ],
)
def test_a_bad_line_is_a_bad_row_and_the_next_is_read(tmp_path: Path, around: Any, line: bytes, says: str) -> None:
    path = tmp_path / ("a.jsonl" if around is JSONL else "a.csv")
    path.write_bytes(line.join(around))
    first, bad, last = rows_of(path)
    assert isinstance(bad, BadRow) and bad.place == f"{path}:2" and says in bad.reason
    assert (first.value["a"], last.value["a"]) == ("1", "2")


def test_a_bad_row_of_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    raw = pa.array([b"fine", b"caf\xe9", None, b"fine"], pa.binary())
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 4, raw.buffers())}), path)
    first, broken, empty, last = rows_of(path)
    assert isinstance(first, Record) and isinstance(last, Record)
    assert str(broken).startswith(f"{path}:2: a value that cannot be read ('utf-8' codec can't decode byte 0xe9 in")
    assert str(empty) == f"{path}:3: the row is empty"


@pytest.mark.parametrize(
    ("name", "broken", "says"),
    [
        ("a.json", b'{"a": 1}', "a.json: not an array of rows"),
        ("a.json", b"", "a.json: not JSON .*line 1 column 1"),
        ("a.json", b'[{"a": 1},\n {"a": ]', r"a.json: not JSON \(Expecting value: line 2 column 8"),
        ("a.json", b'{"a": 1}\n{"a": 2}', "a.json: not JSON .*a file with a row a line is .jsonl"),
        ("a.json", b'[{"a": 1}, {"a": "\xe9"}]', "a.json: not JSON .*byte 0xe9 in position 18"),
        ("a.json", b"[" + b"[" * 100_000, "a.json: not JSON .*recursion"),
        ("a.csv", b"a,a\n1,2\n", "'a' appears twice"),
        ("a.csv", b"\n1,2\n", "it is empty"),
        ("a.csv", b'a,b\n1,2\n1,"2\n', "a.csv:2: not CSV"),
        ("a.csv", b'a,b\n1,"2"3\n', "a.csv:1: not CSV"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz: cannot be read"),
        ("a.jsonl.gz", gzip.compress(jsonl(ROWS))[:-900], r"a.jsonl.gz: cannot be read \(Truncated"),
        ("a.jsonl.zst", b"no zstd", "a.jsonl.zst: cannot be read"),
        ("a.jsonl.zst", zst(jsonl(ROWS))[:-9], "a.jsonl.zst.*: cannot be read .*runcated"),
        ("a.parquet", parquet(TWICE), "a.parquet: among the names of the columns, 'a' appears twice"),
        ("a.parquet", b"PAR1 is not all", "a.parquet: not a parquet file"),
        ("a.parquet", content("a.parquet", ROWS)[:-20], "a.parquet: not a parquet file"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, broken: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(broken)
    with pytest.raises(DataError, match=says):
        rows_of(tmp_path / name)


def test_a_damaged_page_is_named_with_its_row(tmp_path: Path) -> None:
    damaged = bytearray(content("a.parquet", ROWS))
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "a.parquet").write_bytes(damaged)
    with pytest.raises(DataError, match=r"a\.parquet:\d+: (not a parquet file|cannot be read)"):
        rows_of(tmp_path / "a.parquet")


def test_rows_of_any_length_are_refused_before_they_fill_the_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(row_files, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(row_files, "MAX_JSON_BYTES", 1000)
    monkeypatch.setattr(row_files, "BLOCK_BYTES", 100)
    for name, text, says in (
        ("a.jsonl", '{"a": 1}\n{"text": "' + "x" * 5000, ":2: the row is longer than 1000"),
        ("a.csv", f"a\n1\n{'x' * 5000}\n", ":2: the row is longer than 1000"),
        ("a.tsv", 'a\tb\n1\t2\n"x\n' + "x\n" * 900, r":2: not CSV \(field larger than"),  # a quote that is not closed
        ("a.csv", f"{'x' * 5_000_000}\n", ":1: the row is longer than 1000: split it, or check its quotes"),
        ("a.json", json.dumps(ROWS), r": an array of more than 1000 bytes, .* a \.jsonl file of it"),
    ):
        (tmp_path / name).write_text(text)
        tracemalloc.start()
        with pytest.raises(DataError, match=name + says):
            rows_of(tmp_path / name)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()


def test_csv_rows_of_the_longest_length_are_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(row_files, "MAX_ROW_BYTES", 20)
    for end in ("\n", "\r\n", "\r"):
        long = "x" * (20 - len(end))
        (tmp_path / "a.csv").write_bytes(end.join(["a", long, long, '"1\n2\r3"', "last"]).encode())
        rows = [row.value["a"] for row in rows_of(tmp_path / "a.csv") if isinstance(row, Record)]
        assert rows == [long, long, "1\n2\r3", "last"]


def test_long_rows_of_parquet_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(row_files, "PARQUET_BYTES", 100_000)
    texts = [random.Random(n).randbytes(10_000 if n >= 300 else 10).hex() for n in range(330)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=300, use_dictionary=False)
    sizes, read = list[int](), pq.ParquetFile.iter_batches

    def iter_batches(*args: Any, **more: Any) -> Iterator[Any]:
        for batch in read(*args, **more):
            sizes.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    assert [row.value["text"] for row in rows_of(tmp_path / "a.parquet") if isinstance(row, Record)] == texts
    assert max(sizes[-5:]) <= 4 and sum(sizes) == 330


def test_other_files_have_no_rows_and_a_missing_one_is_a_data_error(tmp_path: Path) -> None:
    assert not any(RowFile.of(Path(f"a{end}")) for end in (".txt", ".py", "", ".gz", ".txt.gz", ".parquet.gz", ".md"))
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.csv", "a.parquet"):
        with pytest.raises(DataError, match=rf"{name}: .*(No such file|cannot be read)"):
            rows_of(tmp_path / name)


def mutated(whole: bytes, draw: random.Random) -> bytes:
    """A file with some bytes changed, taken out, doubled or cut off."""
    data = bytearray(whole)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(5):
            case 0 if data:
                data[at % len(data)] = draw.randrange(256)
            case 1:
                del data[at : at + draw.randint(1, 40)]
            case 2:
                data[at:at] = bytes(draw.choice(b'{}[]",:\\\n\0\xff') for _ in range(draw.randint(1, 6)))
            case 3:
                other = draw.randrange(len(data) + 1)
                data[at:at] = data[other : other + 50]
            case 4 if draw.random() < 0.3:
                del data[at:]
    return bytes(data)


def read_mutated(path: Path, whole: bytes, draw: random.Random) -> str:
    """Rows, bad rows with their place, or one DataError that names the file: nothing else. Says which it was."""
    path.write_bytes(mutated(whole, draw))
    found = "rows"
    try:
        for at, read in opened(path).rows():
            row = read()
            assert row.place == f"{path}:{at + 1}"
            found = "bad rows" if isinstance(row, BadRow) else found
    except DataError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
        return "error"
    return found


@pytest.mark.parametrize("tries", [60, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SOME)
def test_mutated_files_are_rows_or_named(tmp_path: Path, name: str, tries: int) -> None:
    draw, whole = random.Random(f"{name} {tries}"), content(name, ROWS[:20])
    found = {read_mutated(tmp_path / name, whole, draw) for _ in range(tries)}
    assert found & {"bad rows", "error"} and (tries < 100 or ("bad rows" if name == "a.jsonl" else "error") in found)


# interleave_datasets of datasets 5.2.0 on three sets of 3, 5 and 9 rows, with these probabilities, seed 42 and
# stopping_strategy="all_exhausted": (set, row).
WEIGHTS = (0.2, 0.3, 0.5)
MIXED = [
    (2, 0), (1, 0), (2, 1), (2, 2), (0, 0), (2, 3), (2, 4), (2, 5), (0, 1),
    (1, 1), (1, 2), (2, 6), (2, 7), (2, 8), (1, 3), (1, 4), (2, 0), (0, 2),
]  # fmt: skip
# train_test_split(test_size=4, seed=42) of datasets 5.2.0 on 17 rows.
TRAIN, TEST = ((10, 9, 7, 3, 0, 15, 5, 2, 4, 14, 1, 13, 8), (12, 16, 11, 6))


def set_of(folder: Path, number: int, count: int) -> FileRows:
    """This many rows {set, row} of a set."""
    (folder / f"set-{number}.jsonl").write_bytes(jsonl([{"set": number, "row": row} for row in range(count)]))
    return FileRows((opened(folder / f"set-{number}.jsonl"),))


def files_of(folder: Path, counts: list[int]) -> tuple[RowFile, ...]:
    """Files of this many rows, which are numbered through."""
    folder.mkdir(exist_ok=True)
    for index, count in enumerate(counts):
        rows = [{"n": sum(counts[:index]) + row} for row in range(count)]
        (folder / f"{index}.jsonl").write_bytes(jsonl(rows))
    return tuple(opened(folder / f"{index}.jsonl") for index in range(len(counts)))


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
    share = None if fraction is None else (fraction, held)
    rows = FileRows(files_of(tmp_path_factory.mktemp("files"), counts), start, stop, share)
    every = list(range(sum(counts)))[start:stop]
    wanted = [n for n in every if rows.has(n - start)]
    assert numbers(rows) == wanted
    for count, (position, _) in enumerate(list(rows.read()), 1):
        assert numbers(rows, position) == wanted[count:]


@given(st.fractions(0, Fraction(99, 100), max_denominator=1000), st.integers(0, 300))
def test_a_share_is_exact_and_its_sides_are_all_rows(fraction: Fraction, count: int) -> None:
    def rows(is_held: bool) -> list[int]:
        return [n for n in range(count) if FileRows((), share=(fraction, is_held)).has(n)]

    assert len(rows(True)) == count * fraction.numerator // fraction.denominator
    assert sorted(rows(True) + rows(False)) == list(range(count))


def test_a_mixture_is_that_of_datasets_and_goes_on_from_every_position(tmp_path: Path) -> None:
    rows = Mixed(tuple(set_of(tmp_path, number, count) for number, count in enumerate((3, 5, 9))), WEIGHTS, 42)
    found: list[Any] = list(rows.read())
    assert [(row.value["set"], row.value["row"]) for _, row in found] == MIXED
    for count, (position, _) in enumerate(found, 1):
        rest = [row for _, row in rows.read(tuple(json.loads(json.dumps(position))))]
        assert rest == [row for _, row in found[count:]]
    rows = Mixed((set_of(tmp_path, 0, 4000), set_of(tmp_path, 1, 1000)), (0.8, 0.2), 7)
    found = list(rows.read())
    for count in (999, 1000, 1001, 2000, 3500):  # more than are drawn at once
        assert next(iter(rows.read(found[count - 1][0]))) == found[count]
    with pytest.raises(DataError, match="part 2 of the data set has no rows"):
        next(iter(Mixed((set_of(tmp_path, 0, 3), set_of(tmp_path, 1, 0)), (1, 1), 0).read()))


def test_drawn_rows_are_those_of_datasets(tmp_path: Path) -> None:
    assert train_test_order(17, 4, 42) == (TRAIN, TEST)
    rows = Shuffled(set_of(tmp_path, 0, 17), TRAIN)
    found: list[Any] = list(rows.read())
    assert [row.value["row"] for _, row in found] == list(TRAIN)
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
def test_what_is_no_slice_or_has_no_rows_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"is neither a path nor a data set of the Hub: .* a slice"):
        HubSpec.parse(f"org/name::{text}")
    with pytest.raises(UsageError, match=r"\[5:5\] has no rows"):
        sliced(files_of(tmp_path, [9]), ("5", "5"))


def test_what_is_not_there_yet_decides_nothing(tmp_path: Path) -> None:
    """The identity is that of the content: not of the place, but of everything that decides on the rows."""
    one, two = (FileRows(files_of(tmp_path / name, [5, 6])) for name in ("one", "two"))
    assert one.identity() == two.identity()
    half = (Fraction(1, 2), True)
    assert one.identity() != FileRows(one.files, 1).identity() != FileRows(one.files, share=half).identity()
    files_of(tmp_path / "two", [6, 5])
    assert one.identity() != two.identity()
