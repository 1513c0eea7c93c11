"""Streams: the rows of the documents in their order, and going on from any row as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.data.loader import Data, Loader
from llmq.data.stream import Stream, StreamedDocument
from llmq.errors import DataError, UsageError
from llmq.options import Options
from llmq.schedule import make_schedule

Shards = list[list[tuple[list[int], list[bool] | None]]]
T = 5


def stream_of(shards: Shards, opened: list[tuple[int, int, int]] | None = None) -> Stream:
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
                )

    return Stream(open_at, T, 1000, "the stream", "its key")


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
        got, trained, state = next(rows)
        assert (got.tolist(), trained.tolist()) == (tokens[n], targets[n]) and got.dtype == trained.dtype == np.int32
    opened: list[tuple[int, int, int]] = []
    again = stream_of(shards, opened).rows(None if state is None else json.loads(json.dumps(state)))
    for n in range(at, at + 4):
        one, other = next(rows), next(again)
        assert one[0].tolist() == other[0].tolist() == tokens[n] and one[2] == other[2]
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
