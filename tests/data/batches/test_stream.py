"""Streams: the rows of the documents in their order, and going on from any row as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.data.batches import stream as stream_module
from llmq.data.batches.loader import Data, Loader
from llmq.data.batches.packing import piece_lengths
from llmq.data.batches.row_layout import PADDED, RowLayout
from llmq.data.batches.stream import PackedStream, Stream, StreamedDocument
from llmq.errors import DataError, UsageError
from llmq.options.parse import Options
from llmq.training.schedule import make_schedule

Shards = list[list[tuple[list[int], list[bool] | None]]]
T = 5


def stream_of(shards: Shards, opened: list[tuple[int, int, int]] | None = None, max_docs: int | None = None) -> Stream:
    """Windows, or packed rows; every third row is two documents."""

    def open_at(begun: int, shard: int, row: int, overall: int) -> Iterator[StreamedDocument]:
        if opened is not None:
            opened.append((shard, row, overall))
        for s in range(shard, len(shards)):
            for r in range(row if s == shard else 0, len(shards[s])):
                ids, trained = shards[s][r]
                yield StreamedDocument(
                    s,
                    r,
                    sum(map(len, shards[:s])) + r,
                    np.array(ids, np.int32),
                    None if trained is None else np.array(trained),
                    lengths_of(ids),
                )

    about = (open_at, T, 1000, "the stream", "its key")
    return Stream(*about) if max_docs is None else PackedStream(*about, max_docs=max_docs, seed=3)


def lengths_of(ids: list[int]) -> tuple[int, ...] | None:
    """Of the documents that a row became."""
    return (2, len(ids) - 2) if len(ids) > 2 and len(ids) % 3 == 0 else None


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
def test_it_goes_on_from_any_row_as_if_nothing_had_happened(sizes: list[list[int]], at: int) -> None:
    shards = drawn(sizes)
    tokens, targets = reference(shards, at + 4)
    rows = stream_of(shards).rows()
    state = None
    for n in range(at):
        got, trained, borders, state = next(rows)
        assert borders is None
        assert (got.tolist(), trained.tolist()) == (tokens[n], targets[n]) and got.dtype == trained.dtype == np.int32
    opened: list[tuple[int, int, int]] = []
    again = stream_of(shards, opened).rows(None if state is None else json.loads(json.dumps(state)))
    for n in range(at, at + 4):
        one, other = next(rows), next(again)
        assert one[0].tolist() == other[0].tolist() == tokens[n] and one.state == other.state
        assert one[1].tolist() == other[1].tolist() == targets[n]
    if state is not None:  # the document is opened where it is; none before it is read
        assert opened[0] == (state["shard"], state["row"], state["overall"])
        assert state["overall"] == sum(map(len, shards[: state["shard"]])) + state["row"]


@settings(max_examples=12, deadline=None)
@given(sizes=SIZES, batch_size=st.integers(1, 3), world=st.integers(1, 3), skip=st.integers(0, 5))
def test_loaders_of_any_world_and_start_read_the_same(
    sizes: list[list[int]], batch_size: int, world: int, skip: int
) -> None:
    shards = drawn(sizes)
    tokens, _ = reference(shards, (skip + 2) * batch_size * world)
    for rank in range(world):
        with Loader(stream_of(shards), batch_size, T, 0, rank, world).start() as loader:
            position, state = 0, None
            for _ in range(skip):
                batch = loader.next()
                position, state = batch.position, batch.stream
            loader.start(position, state)
            for step in (skip, skip + 1):
                batch, at = loader.next(), (step * world + rank) * batch_size
                assert batch.tokens.tolist() == tokens[at : at + batch_size]
                assert batch.position == (step + 1) * batch_size * world and batch.borders is None
                assert batch.stream is not None and batch.epoch == batch.stream["epoch"]


Document = tuple[list[int], list[int]]


def documents_of(shards: Shards) -> list[Document]:
    """Tokens and targets of every piece of every document of a pass, by hand."""
    found = []
    for ids, mask in (row for shard in shards for row in shard if row[0]):
        trained, at = mask or [True] * len(ids), 0
        for length in lengths_of(ids) or (len(ids),):
            start = at
            for count in piece_lengths(np.array([length]), T).tolist():
                aims = [ids[n] if trained[n] else -100 for n in range(start + 1, start + count)]
                found.append((ids[start : start + count], [*aims, -100]))
                start += count - 1  # two pieces share a token
            at += length
    return found


def taken_apart(rows: list[stream_module.StreamedRow], docs: int) -> list[Document]:
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
def test_a_packed_stream_has_every_document_whole_and_once_in_a_pass_and_goes_on_from_any_row(
    sizes: list[list[int]], docs: int, group: int, at: int
) -> None:
    shards = counted(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "GROUP_TOKENS", group)
        patch.setattr(stream_module, "GROUP_ROWS", 1)
        stream = stream_of(shards, max_docs=docs)
        assert stream.limits == (None if docs == 1 else (docs, T))
        rows, whole, epochs = stream.rows(), [], []
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
        again = stream_of(shards, opened, docs).rows(state)
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
    rows = stream_of(counted([sizes.tolist()]), max_docs=5).rows()
    some = [next(rows) for _ in range(1500)]
    assert np.mean([row.tokens > 0 for row in some]) > 0.99


def test_loaders_of_a_packed_stream_share_its_rows_in_any_world() -> None:
    shards = counted([[3, 7, 2, 9, 4], [1, 12, 2, 2]])
    rows = stream_of(shards, max_docs=3).rows()
    expected = [next(rows) for _ in range(12)]
    for rank in range(2):
        with Loader(stream_of(shards, max_docs=3), 2, T, 0, rank, 2).start() as loader:
            for step in range(3):
                batch, mine = loader.next(), expected[4 * step + 2 * rank : 4 * step + 2 * rank + 2]
                assert batch.tokens.tolist() == [row.tokens.tolist() for row in mine]
                assert batch.borders is not None
                assert batch.borders.tolist() == [row.borders.tolist() for row in mine if row.borders is not None]
                assert batch.stream == expected[4 * step + 3].state


def test_the_layout_of_a_packed_stream_is_told() -> None:
    shards = counted([[3, 7]])
    packed = Data(stream_of(shards, max_docs=3), None, 2, T, 1, 0, 1)
    assert packed.facts()["rows"] == "at most 3 documents in each" and packed.identity()["documents of a row"] == 3
    padded = Data(stream_of(shards, max_docs=1), None, 2, T, 1, 0, 1, layout=RowLayout(PADDED, "by --no-packing"))
    assert padded.facts() == {"layout": "padded rows (by --no-packing)"} and padded.limits is None


def test_a_stream_without_tokens_ends_with_its_name() -> None:
    with pytest.raises(DataError, match="the stream has no tokens"):
        next(stream_of([[([], None)], []]).rows())


def test_a_foreign_id_is_named_with_shard_and_row() -> None:
    with pytest.raises(DataError, match=r"the stream, shard 1, row 2: an id is outside the vocabulary \(0 to 999\)"):
        next(stream_of([[([1, 2], None)], [([3], None), ([4, 1000], None)]]).rows())


def test_a_stream_has_no_epochs_to_count_steps_from() -> None:
    data = Data(stream_of([[([1] * 9, None)]]), None, 2, T, 1, 0, 1)
    known = {"seq_len": T, "training samples": None, "data, tokenizer and template": "its key"}
    assert data.identity() == known and data.shares(5) == []
    given = {"model": "m", "train_file": "t"}
    with pytest.raises(UsageError, match="set --steps"):
        make_schedule(Options.parse(given).schedule, data.train.num_windows, 2)
    assert make_schedule(Options.parse({**given, "steps": 7}).schedule, data.train.num_windows, 2).steps == 7
