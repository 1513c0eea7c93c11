"""`--streaming`: the rows of the documents in their order, and the same rows from any of them on."""

import json
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import cut, taken_apart

from llmq.data.batches import named_data
from llmq.data.batches.loader import Data, Loader, RankBatches
from llmq.data.batches.named_data import StreamedRows, open_stream
from llmq.data.batches.rows import PACKED, PADDED, WINDOWS, RowForm, RowLayout, Rows
from llmq.data.chat.encoded import EncodeOptions
from llmq.data.rows.find_sources import Request, find_files
from llmq.data.rows.row_sequences import FileRows
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


def lengths_of(ids: list[int]) -> tuple[int, ...]:
    """Of the documents that a row became."""
    return (2, len(ids) - 2) if len(ids) > 2 and len(ids) % 3 == 0 else (len(ids),)


def drawn(sizes: list[list[int]]) -> Shards:
    """Documents of these sizes, shard by shard; tokens count up from 1, every second document has a mask."""
    shards: Shards = []
    at = 0
    for shard in sizes:
        shards.append([])
        for size in shard:
            ids = [(at + i) % 997 + 1 for i in range(size)]
            shards[-1].append((ids, [i % 3 == 0 for i in ids] if size % 2 else None))
            at += size
    return shards


def one_long(shards: Shards) -> tuple[list[int], list[bool]]:
    """All tokens of a pass, and which are trained."""
    rows = [row for shard in shards for row in shard]
    masks = (mask or [True] * len(ids) for ids, mask in rows)
    return [token for ids, _ in rows for token in ids], list(chain.from_iterable(masks))


def windows_of(shards: Shards, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and targets of the first rows, from one long list of all tokens."""
    ids, trained = one_long(shards)
    ids, trained = (part * (count * T // len(ids) + 2) for part in (ids, trained))
    targets = [token if ok else -100 for token, ok in zip(ids, trained, strict=True)]
    rows = range(0, count * T, T)
    return [ids[at : at + T] for at in rows], [targets[at + 1 : at + T + 1] for at in rows]


SIZES = st.lists(st.lists(st.integers(0, 14), max_size=5), min_size=1, max_size=4).filter(
    lambda s: sum(map(sum, s)) > 0
)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, docs=st.sampled_from([None, None, 1, 2, 4]), group=st.integers(1, 40), at=st.integers(0, 40))
def test_it_has_every_token_in_a_pass_and_resumes_at_any_row(
    sizes: list[list[int]], docs: int | None, group: int, at: int
) -> None:
    """In the order of the stream, or as documents that are whole and apart."""
    shards = drawn(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(named_data, "GROUP_TOKENS", group)
        patch.setattr(named_data, "GROUP_ROWS", 1)
        stream = stream_of(shards, max_docs=docs)
        assert stream.limits == (None if docs in (None, 1) else (docs, T))
        rows, whole, epochs = stream.read(), list[tuple[Any, Rows]](), [0]
        while len(whole) < at + 5 or epochs[-1] < 2:
            whole.append(next(rows))
            epochs.append(whole[-1][0]["epoch"])
        found = Rows.stacked([row for _, row in whole])
        assert found.tokens.dtype == found.targets.dtype == np.int32
        if docs is None:
            assert (found.tokens.tolist(), found.targets.tolist()) == windows_of(shards, len(whole))
        lengths = [length for shard in shards for ids, _ in shard for length in lengths_of(ids) if length]
        for epoch in (0, 1) if docs else ():
            mine = Rows.stacked([row for (_, row), number in zip(whole, epochs[:-1], strict=True) if number == epoch])
            assert (mine.borders is None) == (docs == 1) and (docs == 1 or mine.borders.shape[1] == docs + 1)
            assert taken_apart(mine) == cut(*one_long(shards), lengths, T)
        opened: list[tuple[int, int, int]] = []
        state = json.loads(json.dumps(whole[at][0]))
        again = stream_of(shards, opened, docs).read(state)
        for (after, row), (other, same) in zip(whole[at + 1 : at + 5], again, strict=False):
            np.testing.assert_equal((after, row), (other, same))
        # The document is opened where it is, or its group; none before it is read.
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
    shards = drawn(sizes)
    stream, count = stream_of(shards, max_docs=max_docs), (skip + 2) * batch_size * world
    states, rows = zip(*islice(stream.read(), count), strict=True)
    for rank in range(world):
        batches = RankBatches(stream, batch_size, 0, rank, world)
        position, state = 0, None
        with Loader(batches) as loader:
            for _ in range(skip):
                batch = loader.next()
                position, state = batch.position, batch.stream
        with Loader(batches, position, state) as loader:
            for step in (skip, skip + 1):
                batch, at = loader.next(), (step * world + rank) * batch_size
                found = (batch.tokens, batch.targets, batch.borders)
                np.testing.assert_equal(found, Rows.stacked(rows[at : at + batch_size]))
                assert batch.position == (step + 1) * batch_size * world
                last = states[batch.position - 1]
                assert batch.stream is not None and batch.epoch == last["epoch"]
                assert {**batch.stream, "begun": 0} == {**last, "begun": 0}


def test_a_packed_stream_fills_its_rows() -> None:
    """Of documents of 1 to 3 tokens, which fit together well, but for the last row of each group."""
    sizes = np.random.default_rng(0).integers(1, 4, 4000)
    some = Rows.stacked([row for _, row in islice(stream_of(drawn([sizes.tolist()]), max_docs=5).read(), 1500)])
    assert np.mean(some.tokens > 0) > 0.99


def test_the_layout_of_a_packed_stream_is_said() -> None:
    shards = drawn([[3, 7]])
    packed = Data(stream_of(shards, max_docs=3), None, 2, T, 1, 0, 1)
    assert packed.facts()["rows"] == "at most 3 documents in each" and packed.identity()["documents of a row"] == 3
    padded = Data(stream_of(shards, max_docs=1), None, 2, T, 1, 0, 1, layout=RowLayout(PADDED, "by --no-packing"))
    assert padded.facts() == {"layout": "padded rows (by --no-packing)"} and padded.limits is None


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ([[([], None)], []], "the stream has no tokens"),
        (
            [[([1, 2], None)], [([3], None), ([4, 1000], None)]],
            r"the stream, shard 1, row 2: an id is outside the vocabulary \(0 to 999\)",
        ),
    ],
)
def test_a_stream_without_tokens_and_a_foreign_id_are_named(shards: Shards, says: str) -> None:
    with pytest.raises(DataError, match=says):
        next(stream_of(shards).read())


def test_a_stream_has_no_epochs_to_count_steps_from() -> None:
    data = Data(stream_of([[([1] * 9, None)]]), None, 2, T, 1, 0, 1)
    known = {"seq_len": T, "training samples": None, "data, tokenizer and template": "its key"}
    assert data.identity() == known and data.shares(5) == []
    with pytest.raises(UsageError, match="set --steps"):
        make_schedule(Options.parse({"model": "m", "train_file": "t"}).schedule, data.train.num_windows, 2)


LONG = 8  # tokens of a row of files


def opened(lines: list[list[str]], folder: Path, tokenizer: Path, form: RowForm, options=None, **part) -> StreamedRows:
    """A part of files of these lines."""
    for number, mine in enumerate(lines):
        (folder / f"{number}.jsonl").write_text("".join(f"{line}\n" for line in mine))
    found = find_files([str(folder / "*.jsonl")], streaming=True)
    assert isinstance(found.train, FileRows)
    found, name = replace(found, train=replace(found.train, **part)), TextTokenizer.open(str(tokenizer))
    return open_stream(Request(found, name, options or EncodeOptions()), form, lambda text: None)


def stream_of_files(folder: Path, tokenizer: Path, options=None, kind: str = WINDOWS, **part) -> StreamedRows:
    """A part of three files of 40 rows."""
    rows = [[json.dumps({"text": f"{n} {row} say" * (row % 4 + 1)}) for row in range(40)] for n in range(3)]
    return opened(rows, folder, tokenizer, RowForm(LONG, 1000, kind), options, **part)


@pytest.mark.parametrize(
    "part",
    [
        {"start": 13, "stop": 97},
        pytest.param({"start": 50}, marks=pytest.mark.slow),
        {"share": (Fraction(1, 3), False), "start": 5, "stop": 110},
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_it_resumes_in_every_file_of_a_slice(tmp_path: Path, small_tokenizer: Path, part: dict[str, Any]) -> None:
    stream = stream_of_files(tmp_path, small_tokenizer, **part)
    whole = list(takewhile(lambda row: row[0]["epoch"] < 2, stream.read()))
    assert {state["shard"] for state, _ in whole} >= {1, 2}
    for at in range(0, len(whole) - 30, 7):
        for one, other in zip(whole[at + 1 : at + 31], stream.read(whole[at][0]), strict=False):
            np.testing.assert_equal(one, other)


def test_a_row_that_becomes_several_documents_is_packed_as_several(tmp_path: Path, small_tokenizer: Path) -> None:
    """What was split is not one again, as it is in windows."""
    options = EncodeOptions(overlong="split", seq_len=LONG)
    stream = stream_of_files(tmp_path, small_tokenizer, options=options, kind=PACKED)
    for _, document in islice(stream.documents(0, START), 20):
        whole, rest = divmod(len(document.ids), LONG)
        assert np.diff(document.stops, prepend=0).tolist() == [LONG] * whole + [rest] * (rest > 0)
    rows = Rows.stacked([row for state, row in islice(stream.read(), 400) if state["epoch"] == 0])
    docs, lengths = stream.form.docs, np.diff(rows.borders, axis=1)
    assert docs and stream.limits == (docs, LONG)
    assert len(lengths) > 100 and (lengths == LONG).any() and docs == (lengths > 0).sum(1).max()


@pytest.mark.parametrize(("layout", "max_docs", "docs"), [(PACKED, None, 4), (PACKED, 2, 2), (PADDED, None, 1)])
def test_the_documents_of_a_row_are_known_from_the_first_rows(
    tmp_path: Path, small_tokenizer: Path, layout: str, max_docs: int | None, docs: int
) -> None:
    """Few as they are, they tell how many fit into a long row."""
    rows = [['{"input_ids": [5, 6, 7]}'] * 2000]
    for seq_len, expected in ((12, docs), (1200, {4: 400}.get(docs, docs))):
        form = RowForm(seq_len, 1000, layout, 0, max_docs)
        assert opened(rows, tmp_path, small_tokenizer, form).form.docs == expected


def test_two_streams_have_two_keys(tmp_path: Path, small_tokenizer: Path) -> None:
    one, same, other = (stream_of_files(tmp_path, small_tokenizer, start=start).key for start in (3, 3, 4))
    assert one == same != other
