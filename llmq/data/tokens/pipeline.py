"""From text and rows to token ids, in order: one thread reads ahead, and batches are tokenized two at a time.

The tokenizers library works on a batch with all cores and without Python's lock. What Python does for a batch (reading
it, making an array of the ids) is done meanwhile for its neighbours, so that the cores need not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from llmq.data.chat.counts import Counts
from llmq.data.chat.encode import Encoder
from llmq.data.rows.file_rows import RowSequence
from llmq.data.rows.records import BadRow, Record, Row
from llmq.data.stream import START, Position, ReadAhead
from llmq.data.tokens.text import Document, pieces
from llmq.data.tokens.tokenizer import TextTokenizer

BATCH_CHARACTERS = 1 << 19  # tokenized at once: the library holds some 25 MB meanwhile
BATCH_ROWS = 2048
AT_ONCE = 2  # batches: while one of them ends with less work than there are cores, the other has some
READ_AHEAD = 2  # batches that are read or tokenized before they are asked for


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """What a batch became. Documents need not end with their batch."""

    ids: np.ndarray  # (n,) int32
    trained: np.ndarray | None  # (n,) bool: whether each is trained as a target; None: all are
    stops: np.ndarray  # (documents that end here,) int64: one after the last token of each, ascending
    num_bytes: int = 0  # of text, where it is text files
    counts: Counts = field(default_factory=Counts)  # of the encoder, where it is rows
    bad: Sequence[BadRow] = ()  # rows that are left out, in order
    positions: Sequence[Position] = ()  # of rows: for each document, the position after the row that it is from

    def by_row(self) -> Iterator[tuple[Position, RowTokens]]:
        """What each row became, with the position after it."""
        start = 0
        for position, mine in groupby(zip(self.positions, self.stops.tolist(), strict=True), itemgetter(0)):
            stops = [start, *(stop for _, stop in mine)]
            lengths = tuple(stop - first for first, stop in pairwise(stops))
            part, start = slice(start, stops[-1]), stops[-1]
            yield position, RowTokens(self.ids[part], None if self.trained is None else self.trained[part], lengths)


class RowTokens(NamedTuple):
    """The tokens of a row, which became one document or several."""

    ids: np.ndarray  # (n,) int32
    trained: np.ndarray | None  # (n,) bool; None: all
    lengths: tuple[int, ...]  # of the documents


class Work(Protocol):
    """What is to be tokenized: a stream of batches, and how one of them becomes tokens."""

    def read(self, position: Position = START) -> Iterator[tuple[Position, Any]]: ...
    def encode(self, batch: Any) -> TokenBatch: ...


class Edge(Enum):
    """Where a document begins and ends among pieces of text."""

    BEGIN = auto()
    END = auto()


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of documents between their edges."""

    items: list[str | Edge]
    num_bytes: int


@dataclass(frozen=True, eq=False)
class TextWork:
    """Whole text files as documents, tokenized in pieces. A position is (document, byte in it)."""

    documents: Sequence[Document]
    tokenizer: TextTokenizer

    def read(self, position: Position = START) -> Iterator[tuple[Position, Pieces]]:
        """Batches of about BATCH_CHARACTERS; raises DataError for what is not UTF-8."""
        items: list[str | Edge] = []
        characters = num_bytes = 0
        for item, size, after in self._items(position):
            items.append(item)
            characters, num_bytes = characters + (len(item) if isinstance(item, str) else 0), num_bytes + size
            if characters >= BATCH_CHARACTERS:
                yield after, Pieces(items, num_bytes)
                items, characters, num_bytes = [], 0, 0
        if items:
            yield after, Pieces(items, num_bytes)

    def _items(self, position: Position) -> Iterator[tuple[str | Edge, int, Position]]:
        """Pieces and edges, each with its bytes and the position after it."""
        first, at = position or (0, 0)
        for number, document in enumerate(self.documents[first:], first):
            if not at:
                yield Edge.BEGIN, 0, (number, 0)
            for piece in pieces(document.after(at), self.tokenizer.in_pieces):
                size = len(piece) if piece.isascii() else len(piece.encode())
                at += size
                yield piece, size, (number, at)
            yield Edge.END, 0, (number + 1, 0)
            at = 0

    def encode(self, batch: Pieces) -> TokenBatch:
        """The ids of all pieces, with what begins and ends a text around each document."""
        texts = [item for item in batch.items if isinstance(item, str)]
        encodings = iter(self.tokenizer.encoder.encode_batch_fast(texts, add_special_tokens=False))
        edges = {Edge.BEGIN: self.tokenizer.begin_ids, Edge.END: (self.tokenizer.eos_token_id,)}
        parts = [
            np.array(edges[item] if isinstance(item, Edge) else next(encodings).ids, np.int32) for item in batch.items
        ]
        stops = np.cumsum([len(part) for part in parts])
        ends = np.array([item is Edge.END for item in batch.items])
        return TokenBatch(np.concatenate(parts), None, stops[ends], batch.num_bytes)


RowBatch = list[tuple[Position, Row]]  # rows, with the position after each


@dataclass(frozen=True, eq=False)
class RowWork:
    """Rows, each a document (or several) as the encoder makes it; `most` are tokenized together."""

    rows: RowSequence
    encoder: Encoder
    most: int = BATCH_ROWS

    def read(self, position: Position = START) -> Iterator[tuple[Position, RowBatch]]:
        """Batches of about BATCH_CHARACTERS, and at most `most` rows."""
        batch: RowBatch = []
        characters = 0
        for after, row in self.rows.read(position):
            batch.append((after, row))
            characters += _characters(row.value) if isinstance(row, Record) else 0
            if characters >= BATCH_CHARACTERS or len(batch) == self.most:
                yield after, batch
                batch, characters = [], 0
        if batch:
            yield after, batch

    def encode(self, batch: RowBatch) -> TokenBatch:
        """The ids of all rows that can be used, and what is wrong with the others, both in their order."""
        bad = [row for _, row in batch if isinstance(row, BadRow)]
        encoder = self.encoder.copied()
        documents = encoder.encode([row for _, row in batch if isinstance(row, Record)], bad)
        order = {row.place: number for number, (_, row) in enumerate(batch)}
        bad.sort(key=lambda row: order[row.place])
        ids = np.concatenate([document.ids for document in documents]) if documents else np.zeros(0, np.int32)
        trained = None
        if any(document.trained is not None for document in documents):
            masks = (np.ones(len(d.ids), bool) if d.trained is None else d.trained for d in documents)
            trained = np.concatenate(list(masks))
        stops = np.cumsum([len(document.ids) for document in documents], dtype=np.int64)
        positions = [batch[order[document.place]][0] for document in documents]
        return TokenBatch(ids, trained, stops, counts=encoder.counts, bad=bad, positions=positions)


def _characters(value: Any) -> int:
    """About how much text there is in a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    if isinstance(value, list):
        return sum(map(_characters, value)) if value and not isinstance(value[0], int) else len(value)
    return 1


def tokenized(work: Work, position: Position = START) -> Generator[tuple[Position, TokenBatch], None, None]:
    """The tokens of each batch of `work` after `position`, as a stream has them; closing it ends its threads.

    Raises what reading or encoding raises, in the place of the batch where it happened.
    """
    # One batch at a time where the tokenizers library is set to use one thread.
    single = os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("off", "false", "f", "no", "n", "0")
    pool = ThreadPoolExecutor(1 if single else AT_ONCE, "llmq-tokenize")
    results = ((after, pool.submit(work.encode, batch)) for after, batch in work.read(position))
    try:
        with closing(ReadAhead(results, READ_AHEAD)) as ahead:
            for after, result in ahead:
                yield after, result.result()
    finally:
        pool.shutdown(cancel_futures=True)
