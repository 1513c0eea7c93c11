"""`--streaming`: the rows of the documents in their order, and the same rows from any of them on."""

import json
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.data.batches import named_data
from llmq.data.batches.loader import Data, Loader, RankBatches
from llmq.data.batches.named_data import StreamedRows, open_stream
from llmq.data.batches.packing import cut_documents
from llmq.data.batches.rows import PACKED, PADDED, WINDOWS, RowForm, RowLayout
from llmq.data.chat.encoded import EncodeOptions
from llmq.data.rows.find_sources import Found, Request
from llmq.data.rows.row_files import FileRows, HeldShare, RowFile
from llmq.data.stream import START, Position
from llmq.data.tokens.pipeline import TokenSpan
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.errors import DataError, UsageError
from llmq.options.parse import Options
from llmq.training.schedule import make_schedule

Shards = list[list[tuple[list[int], list[bool] | None]]]
T = 5


def stream_of(
    shards: Shards, opened: list[tuple[int, int, int]] | None = None, max_docs: int | None = None
) -> StreamedRows:
    """Windows, or packed rows; every third row is two documents."""

    def documents(begun: int, position: Position) -> Iterator[tuple[Position, TokenSpan]]:
        shard, row, overall = position or (0, 0, 0)
        if opened is not None:
            opened.append((shard, row, overall))
        for s in range(shard, len(shards)):
            for r in range(row if s == shard else 0, len(shards[s])):
                ids, trained = shards[s][r]
                mask = None if trained is None else np.array(trained)
                after = (s, r + 1, sum(map(len, shards[:s])) + r + 1)
                yield after, TokenSpan(np.array(ids, np.int32), mask, np.cumsum(lengths_of(ids)))

    form = RowForm(T, 1000, WINDOWS if max_docs is None else PACKED, 3, max_docs)
    return StreamedRows(documents, form, "the stream", "its key")


class Row(NamedTuple):
    """One row, and the position after it."""

    tokens: np.ndarray
    targets: np.ndarray
    borders: np.ndarray | None
    state: dict[str, int]


def rows_of(stream: StreamedRows, state: Any = START) -> Iterator[Row]:
    for after, (tokens, targets, borders) in stream.read(state):
        assert len(tokens) == len(targets) == 1
        yield Row(tokens[0], targets[0], None if borders is None else borders[0], after)


def lengths_of(ids: list[int]) -> tuple[int, ...]:
    """Of the documents that a row became."""
    return (2, len(ids) - 2) if len(ids) > 2 and len(ids) % 3 == 0 else (len(ids),)


def drawn(sizes: list[list[int]]) -> Shards:
    """Documents of these sizes, shard by shard; tokens count up, every second document has a mask."""
    shards: Shards = []
    at = 0
    for shard in sizes:
        shards.append([])
        for size in shard:
            ids = [(at + i) % 997 for i in range(size)]
            shards[-1].append((ids, [i % 3 == 0 for i in ids] if size % 2 else None))
            at += size
    return shards


def reference(shards: Shards, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """The first rows, from one long list of all tokens."""
    ids: list[int] = []
    trained: list[bool] = []
    while len(ids) <= count * T + 1:
        for shard in shards:
            for document, mask in shard:
                ids += document
                trained += mask or [True] * len(document)
    targets = [token if ok else -100 for token, ok in zip(ids, trained, strict=True)]
    rows = range(0, count * T, T)
    return [ids[at : at + T] for at in rows], [targets[at + 1 : at + T + 1] for at in rows]


SIZES = st.lists(st.lists(st.integers(0, 14), max_size=5), min_size=1, max_size=4).filter(
    lambda s: sum(map(sum, s)) > 0
)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, at=st.integers(0, 25))
def test_it_resumes_at_any_row(sizes: list[list[int]], at: int) -> None:
    shards = drawn(sizes)
    tokens, targets = reference(shards, at + 4)
    rows = rows_of(stream_of(shards))
    state = None
    for n in range(at):
        got, trained, borders, state = next(rows)
        assert borders is None
        assert (got.tolist(), trained.tolist()) == (tokens[n], targets[n]) and got.dtype == trained.dtype == np.int32
    opened: list[tuple[int, int, int]] = []
    again = rows_of(stream_of(shards, opened), () if state is None else json.loads(json.dumps(state)))
    for n in range(at, at + 4):
        one, other = next(rows), next(again)
        assert one[0].tolist() == other[0].tolist() == tokens[n] and one.state == other.state
        assert one[1].tolist() == other[1].tolist() == targets[n]
    if state is not None:  # the document is opened where it is; none before it is read
        assert opened[0] == (state["shard"], state["row"], state["overall"])
        assert state["overall"] == sum(map(len, shards[: state["shard"]])) + state["row"]


@settings(max_examples=16, deadline=None)
@given(
    sizes=SIZES,
    batch_size=st.integers(1, 3),
    world=st.integers(1, 3),
    skip=st.integers(0, 5),
    max_docs=st.sampled_from([None, 1, 3]),
)
def test_loaders_of_any_world_and_start_read_the_same(
    sizes: list[list[int]], batch_size: int, world: int, skip: int, max_docs: int | None
) -> None:
    shards = counted(sizes)
    rows = list(islice(rows_of(stream_of(shards, max_docs=max_docs)), (skip + 2) * batch_size * world))
    for rank in range(world):
        batches = RankBatches(stream_of(shards, max_docs=max_docs), batch_size, 0, rank, world)
        position, state = 0, None
        with Loader(batches) as loader:
            for _ in range(skip):
                batch = loader.next()
                position, state = batch.position, batch.stream
        with Loader(batches, position, state) as loader:
            for step in (skip, skip + 1):
                batch, at = loader.next(), (step * world + rank) * batch_size
                for name in ("tokens", "targets", "borders"):
                    mine = [getattr(row, name) for row in rows[at : at + batch_size]]
                    got = getattr(batch, name)
                    assert [None] * batch_size == mine if got is None else np.array_equal(got, mine)
                assert batch.position == (step + 1) * batch_size * world
                last = rows[batch.position - 1].state
                assert batch.stream is not None and batch.epoch == last["epoch"]
                assert {**batch.stream, "begun": 0} == {**last, "begun": 0}


Document = tuple[list[int], list[int]]


def documents_of(shards: Shards) -> list[Document]:
    """Tokens and targets of every piece of every document of a pass, by hand."""
    found = []
    for ids, mask in (row for shard in shards for row in shard if row[0]):
        trained, at = mask or [True] * len(ids), 0
        for length in lengths_of(ids):
            start = at
            for count in cut_documents(np.array([length]), T)[1].tolist():
                aims = [ids[n] if trained[n] else -100 for n in range(start + 1, start + count)]
                found.append((ids[start : start + count], [*aims, -100]))
                start += count - 1  # two pieces share a token
            at += length
    return found


def taken_apart(rows: list[Row], docs: int) -> list[Document]:
    """The documents of rows, whose padding is tokens 0 without a target; no document has a token 0 at its end."""
    found = []
    for tokens, targets, borders, _ in rows:
        marks = [0, T] if borders is None else borders.tolist()
        assert (docs == 1) == (borders is None) and len(marks) == docs + 1 and marks[0] == 0 and marks[-1] == T
        for start, stop in pairwise(marks):
            if start < T:
                ids, aims = tokens[start:stop].tolist(), targets[start:stop].tolist()
                while ids[-1] == 0 and stop == T and len(ids) > 1:
                    assert ids.pop() == 0 and aims.pop() == -100
                found.append((ids, aims))
    return found


def counted(sizes: list[list[int]]) -> Shards:
    """As drawn, without the token 0, which is what rows are padded with."""
    return [[([i + 1 for i in ids], mask) for ids, mask in shard] for shard in drawn(sizes)]


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, docs=st.integers(1, 4), group=st.integers(1, 40), at=st.integers(0, 60))
@pytest.mark.slow
def test_a_packed_stream_has_every_document_whole_and_once_in_a_pass_and_resumes_at_any_row(
    sizes: list[list[int]], docs: int, group: int, at: int
) -> None:
    shards = counted(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(named_data, "GROUP_TOKENS", group)
        patch.setattr(named_data, "GROUP_ROWS", 1)
        stream = stream_of(shards, max_docs=docs)
        assert stream.limits == (None if docs == 1 else (docs, T))
        rows, whole, epochs = rows_of(stream), [], []
        while len(whole) < at + 4 or whole[-1].state["epoch"] < 2:
            before = whole[-1].state["epoch"] if whole else 0
            whole.append(next(rows))
            assert whole[-1].tokens.dtype == whole[-1].targets.dtype == np.int32
            epochs.append(before)
        for epoch in (0, 1):
            mine = [row for row, number in zip(whole, epochs, strict=True) if number == epoch]
            assert sorted(taken_apart(mine, docs)) == sorted(documents_of(shards))
        opened: list[tuple[int, int, int]] = []
        state = json.loads(json.dumps(whole[at].state))
        again = rows_of(stream_of(shards, opened, docs), state)
        for row in whole[at + 1 : at + 4]:
            other = next(again)
            assert row.state == other.state and row.tokens.tolist() == other.tokens.tolist()
            assert row.targets.tolist() == other.targets.tolist()
            assert (row.borders is None) == (other.borders is None)
            assert row.borders is None or row.borders.tolist() == other.borders.tolist()
        assert opened[0] == (state["shard"], state["row"], state["overall"])  # none before its group is read


def test_a_packed_stream_fills_its_rows() -> None:
    """Of documents of 1 to 3 tokens, which fit together well, but for the last row of each group."""
    sizes = np.random.default_rng(0).integers(1, 4, 4000)
    rows = rows_of(stream_of(counted([sizes.tolist()]), max_docs=5))
    some = [next(rows) for _ in range(1500)]
    assert np.mean([row.tokens > 0 for row in some]) > 0.99


def test_the_layout_of_a_packed_stream_is_told() -> None:
    shards = counted([[3, 7]])
    packed = Data(stream_of(shards, max_docs=3), None, 2, T, 1, 0, 1)
    assert packed.facts()["rows"] == "at most 3 documents in each" and packed.identity()["documents of a row"] == 3
    padded = Data(stream_of(shards, max_docs=1), None, 2, T, 1, 0, 1, layout=RowLayout(PADDED, "by --no-packing"))
    assert padded.facts() == {"layout": "padded rows (by --no-packing)"} and padded.limits is None


def test_a_stream_without_tokens_ends_with_its_name() -> None:
    with pytest.raises(DataError, match="the stream has no tokens"):
        next(rows_of(stream_of([[([], None)], []])))


def test_a_foreign_id_is_named_with_shard_and_row() -> None:
    with pytest.raises(DataError, match=r"the stream, shard 1, row 2: an id is outside the vocabulary \(0 to 999\)"):
        next(rows_of(stream_of([[([1, 2], None)], [([3], None), ([4, 1000], None)]])))


def test_a_stream_has_no_epochs_to_count_steps_from() -> None:
    data = Data(stream_of([[([1] * 9, None)]]), None, 2, T, 1, 0, 1)
    known = {"seq_len": T, "training samples": None, "data, tokenizer and template": "its key"}
    assert data.identity() == known and data.shares(5) == []
    given = {"model": "m", "train_file": "t"}
    with pytest.raises(UsageError, match="set --steps"):
        make_schedule(Options.parse(given).schedule, data.train.num_windows, 2)
    assert make_schedule(Options.parse({**given, "steps": 7}).schedule, data.train.num_windows, 2).steps == 7


LONG = 8  # tokens of a row of files


def stream_of_files(
    folder: Path, tokenizer: Path, options: EncodeOptions | None = None, kind: str = WINDOWS, **part: Any
) -> StreamedRows:
    """A part of three files of 40 rows."""
    files = []
    for number in range(3):
        path = folder / f"{number}.jsonl"
        path.write_text(
            "".join(json.dumps({"text": f"{number} {row} say" * (row % 4 + 1)}) + "\n" for row in range(40))
        )
        file = RowFile.of(path)
        assert file is not None
        files.append(file)
    opened = TextTokenizer.open(str(tokenizer))
    found = Found("rows", ("rows",), FileRows(tuple(files), **part), None, "all")
    request = Request(found, opened, options or EncodeOptions())
    return open_stream(request, RowForm(LONG, opened.vocab_size, kind), lambda text: None)


@pytest.mark.quick("part0")
@pytest.mark.parametrize(
    "part",
    [
        {"start": 13, "stop": 97},
        pytest.param({"start": 50}, marks=pytest.mark.slow),
        {"share": HeldShare(Fraction(1, 3), False), "start": 5, "stop": 110},
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_it_resumes_in_every_file_of_a_slice(tmp_path: Path, small_tokenizer: Path, part: dict[str, Any]) -> None:
    stream = stream_of_files(tmp_path, small_tokenizer, **part)
    rows = rows_of(stream)
    whole = []
    while not whole or whole[-1].state["epoch"] < 2:
        whole.append(next(rows))
    assert {row.state["shard"] for row in whole} >= {1, 2}
    for at in range(0, len(whole) - 30, 7):
        again = rows_of(stream, whole[at].state)
        for row in whole[at + 1 : at + 31]:
            got = next(again)
            np.testing.assert_array_equal(got.tokens, row.tokens)
            np.testing.assert_array_equal(got.targets, row.targets)
            assert got.state == row.state


def test_a_row_that_becomes_several_documents_is_packed_as_several(tmp_path: Path, small_tokenizer: Path) -> None:
    """What was split is not one again, as it is in windows."""
    options = EncodeOptions(overlong="split", seq_len=LONG)
    stream = stream_of_files(tmp_path, small_tokenizer, options=options, kind=PACKED)
    for _, document in islice(stream.documents(0, START), 20):
        whole, rest = divmod(len(document.ids), LONG)
        assert np.diff(document.stops, prepend=0).tolist() == [LONG] * whole + [rest] * (rest > 0)
    rows = [row for row in islice(rows_of(stream), 400) if row.state["epoch"] == 0]
    docs = stream.form.docs
    assert docs and stream.limits == (docs, LONG)
    borders = np.stack([row.borders for row in rows if row.borders is not None])
    lengths = np.diff(borders, axis=1)
    assert len(borders) == len(rows) > 100 and (lengths == LONG).any() and docs == (lengths > 0).sum(1).max()


@pytest.mark.parametrize(("layout", "max_docs", "docs"), [(PACKED, None, 4), (PACKED, 2, 2), (PADDED, None, 1)])
def test_the_documents_of_a_row_are_known_from_the_first_rows(
    tmp_path: Path, small_tokenizer: Path, layout: str, max_docs: int | None, docs: int
) -> None:
    """Few as they are, they tell how many fit into a long row."""
    path = tmp_path / "short.jsonl"
    path.write_text('{"input_ids": [5, 6, 7]}\n' * 2000)
    file = RowFile.of(path)
    assert file is not None
    tokenizer = TextTokenizer.open(str(small_tokenizer))
    found = Found("rows", ("rows",), FileRows((file,)), None, "all")
    request = Request(found, tokenizer, EncodeOptions())
    for seq_len, expected in ((12, docs), (1200, {4: 400}.get(docs, docs))):
        form = RowForm(seq_len, tokenizer.vocab_size, layout, 0, max_docs)
        assert open_stream(request, form, lambda text: None).form.docs == expected


def test_two_streams_have_two_keys(tmp_path: Path, small_tokenizer: Path) -> None:
    one, same, other = (stream_of_files(tmp_path, small_tokenizer, start=start) for start in (3, 3, 4))
    assert one.key == same.key != other.key
