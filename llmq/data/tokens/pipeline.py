"""From text and rows to token ids, in order: one thread reads ahead, and batches are tokenized two at a time.

The tokenizers library works on a batch with all cores and without Python's lock. What Python does for a batch (reading
it, making an array of the ids) is done meanwhile for its neighbours, so that the cores need not wait for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from llmq.data.chat.counts import Counts
from llmq.data.chat.encode import Encoder
from llmq.data.read_ahead import ReadAhead
from llmq.data.rows.file_rows import START, Position, RowSequence
from llmq.data.rows.records import BadRow, Record
from llmq.data.tokens.text import Document, pieces
from llmq.data.tokens.tokenizer import TextTokenizer

BATCH_CHARACTERS = 1 << 19  # tokenized at once: the library holds some 25 MB meanwhile
BATCH_ROWS = 2048
AT_ONCE = 2  # batches: while one of them ends with less work than there are cores, the other has some
READ_AHEAD = 2  # batches that are read or tokenized before they are asked for

B = TypeVar("B")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """What a batch became. Documents need not end with their batch."""

    ids: np.ndarray  # (n,) int32
    trained: np.ndarray | None  # (n,) bool: whether each is trained as a target; None: all are
    stops: np.ndarray  # (documents that end here,) int64: one behind the last token of each, ascending
    position: Position  # where the source goes on behind this batch
    num_bytes: int = 0  # of text, where it is text files
    counts: Counts = field(default_factory=Counts)  # of the encoder, where it is rows
    bad: Sequence[BadRow] = field(default_factory=tuple)  # rows that are left out, in order


class Work(Protocol[B, R_co]):
    """What is to be tokenized: batches of something, and how one of them becomes tokens."""

    def batches(self, position: Position) -> Iterator[B]: ...

    def encode(self, batch: B) -> R_co: ...


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of documents; an empty piece is where one begins or ends."""

    texts: list[str]
    begins: list[bool]
    ends: list[bool]
    num_bytes: int
    position: Position


@dataclass(frozen=True, eq=False)
class TextWork:
    """Whole text files as documents, tokenized in pieces. A position is (document, byte in it)."""

    documents: Sequence[Document]
    tokenizer: TextTokenizer

    def batches(self, position: Position = START) -> Iterator[Pieces]:
        """Batches of about BATCH_CHARACTERS; raises DataError for what is not UTF-8."""
        first, at = position or (0, 0)
        texts: list[str] = []
        begins: list[bool] = []
        ends: list[bool] = []
        characters = num_bytes = 0
        for number in range(first, len(self.documents)):
            if not at:
                texts.append("")
                begins.append(True)
                ends.append(False)
            for piece in pieces(self.documents[number].behind(at), self.tokenizer.in_pieces):
                size = len(piece) if piece.isascii() else len(piece.encode())
                texts.append(piece)
                begins.append(False)
                ends.append(False)
                characters, num_bytes, at = characters + len(piece), num_bytes + size, at + size
                if characters >= BATCH_CHARACTERS:
                    yield Pieces(texts, begins, ends, num_bytes, (number, at))
                    texts, begins, ends, characters, num_bytes = [], [], [], 0, 0
            texts.append("")
            begins.append(False)
            ends.append(True)
            at = 0
        yield Pieces(texts, begins, ends, num_bytes, (len(self.documents), 0))

    def encode(self, batch: Pieces) -> TokenBatch:
        """The ids of all pieces, with what begins and ends a text around each document."""
        encodings = self.tokenizer.encoder.encode_batch_fast(batch.texts, add_special_tokens=False)
        first = np.array(self.tokenizer.begin_ids, np.int32)
        counts = np.array([len(code) for code in encodings]) + np.array(batch.ends)
        counts += len(first) * np.array(batch.begins)
        stops = np.cumsum(counts)
        ids = np.full(int(stops[-1]) if len(stops) else 0, self.tokenizer.eos_token_id, np.int32)
        for code, stop, begin, end in zip(encodings, stops.tolist(), batch.begins, batch.ends, strict=True):
            if begin:
                ids[stop - len(first) : stop] = first
            elif not end:
                ids[stop - len(code) : stop] = np.fromiter(code.ids, np.int32, len(code))
        return TokenBatch(ids, None, stops[batch.ends], batch.position, batch.num_bytes)


class Encoders:
    """An encoder for each thread that asks, made from one."""

    def __init__(self, encoder: Encoder) -> None:
        self.first = encoder
        self._local = threading.local()

    def own(self) -> Encoder:
        """The encoder of this thread, with nothing counted."""
        if not hasattr(self._local, "encoder"):
            self._local.encoder = self.first.copied()
        own: Encoder = self._local.encoder
        own.counts = Counts()
        return own


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows to tokenize together."""

    rows: list[Record | BadRow]
    position: Position


@dataclass(frozen=True, eq=False)
class RowWork:
    """Rows, each a document (or several) as the encoder makes it."""

    rows: RowSequence
    encoders: Encoders

    def batches(self, position: Position = START) -> Iterator[Chunk]:
        """Batches of about BATCH_CHARACTERS, and at most BATCH_ROWS rows."""
        rows: list[Record | BadRow] = []
        characters = 0
        for behind, row in self.rows.read(position):
            rows.append(row)
            characters += _characters(row.value) if isinstance(row, Record) else 0
            if characters >= BATCH_CHARACTERS or len(rows) == BATCH_ROWS:
                yield Chunk(rows, behind)
                rows, characters = [], 0
        if rows:
            yield Chunk(rows, behind)

    def encode(self, batch: Chunk) -> TokenBatch:
        """The ids of all rows that can be used, and what is wrong with the others."""
        bad = [row for row in batch.rows if isinstance(row, BadRow)]
        encoder = self.encoders.own()
        documents = encoder.encode([row for row in batch.rows if isinstance(row, Record)], bad)
        if len(bad) > 1:
            order = {row.place: number for number, row in enumerate(batch.rows)}
            bad.sort(key=lambda row: order[row.place])
        stops = np.cumsum([len(document.ids) for document in documents], dtype=np.int64)
        ids = np.concatenate([document.ids for document in documents]) if documents else np.zeros(0, np.int32)
        trained = None
        if any(document.trained is not None for document in documents):
            masks = [np.ones(len(d.ids), bool) if d.trained is None else d.trained for d in documents]
            trained = np.concatenate(masks)
        return TokenBatch(ids, trained, stops, batch.position, counts=encoder.counts, bad=bad)


def _characters(value: Any) -> int:
    """About how much text there is in a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    if isinstance(value, list):
        return sum(map(_characters, value)) if value and not isinstance(value[0], int) else len(value)
    return 1


def tokenized(work: Work[B, R], position: Position = START) -> Generator[R, None, None]:
    """The tokens of all batches of `work` from `position` on, in order; closing the iterator ends its threads.

    Raises what reading or encoding raises, in the place of the batch where it happened.
    """
    pool = ThreadPoolExecutor(_at_once(), "llmq-tokenize")
    results = (pool.submit(work.encode, batch) for batch in work.batches(position))
    try:
        with closing(ReadAhead(results, READ_AHEAD)) as ahead:
            for result in ahead:
                yield result.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _at_once() -> int:
    """One batch at a time where the tokenizers library is told to use one thread."""
    single = os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("off", "false", "f", "no", "n", "0")
    return 1 if single else AT_ONCE
