"""From text and rows to token ids, in order.

One thread reads ahead, and batches are tokenized two at a time. The tokenizers library works on a batch with all cores
and without Python's lock; what Python does for a batch of text (reading it, making arrays of ids) is done meanwhile for
its neighbours. For rows Python does much more (templates, masks), so that many rows are tokenized by as many
processes as there are cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from multiprocessing.connection import Connection, Pipe
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from llmq.data.chat.encode import Encoder
from llmq.data.chat.encoded import Counts
from llmq.data.rows.row_files import BadRow, Record, Row, RowSequence
from llmq.data.stream import START, Position, ReadAhead
from llmq.data.tokens.text import Document, pieces
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.errors import LlmqError

BATCH_CHARACTERS = 1 << 19  # tokenized at once: the library holds some 25 MB meanwhile
BATCH_ROWS = 2048
AT_ONCE = 2  # batches: while one of them ends with less work than there are cores, the other has some
FEW = 3  # batches of rows, of about a second each: a process takes longer than that to begin
T = TypeVar("T")
Placed = list[tuple[Position, T]]  # pieces of text or rows, with the position after each


class TokenSpan(NamedTuple):
    """Documents one after the other, the first of which may have begun before, and the last may go on after."""

    ids: np.ndarray  # (n,) int32
    trained: np.ndarray | None  # (n,) bool: whether each is trained as a target; None: all are
    stops: np.ndarray  # (documents that end here,) int64: one after the last token of each, ascending

    def part(self, start: int, stop: int) -> TokenSpan:
        """The tokens [start, stop)."""
        first, last = np.searchsorted(self.stops, [start, stop], side="right")
        trained = None if self.trained is None else self.trained[start:stop]
        return TokenSpan(self.ids[start:stop], trained, self.stops[first:last] - start)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """What a batch became. Documents need not end with their batch."""

    tokens: TokenSpan
    num_bytes: int = 0  # of text, where it is text files
    counts: Counts = field(default_factory=Counts)  # of the encoder, where it is rows
    bad: Sequence[BadRow] = ()  # rows that are left out, in order
    positions: Sequence[Position] = ()  # of rows: for each document, the position after the row that it is from

    def by_row(self) -> Iterator[tuple[Position, TokenSpan]]:
        """What each row became, one document or several, with the position after it."""
        start = 0
        for position, mine in groupby(zip(self.positions, self.tokens.stops.tolist(), strict=True), itemgetter(0)):
            *_, (_, stop) = mine
            yield position, self.tokens.part(start, stop)
            start = stop


class Work(Protocol):
    """What is to be tokenized: a stream of batches, and how one of them becomes tokens."""

    def read(self, position: Position = START) -> Iterator[tuple[Position, Any]]: ...
    def encode(self, batch: Any) -> TokenBatch: ...


class TextPiece(NamedTuple):
    """A piece of a document, and whether it begins there; the end of a document is a piece of its own."""

    text: str
    num_bytes: int
    begins: bool = False
    ends: bool = False


@dataclass(frozen=True, eq=False)
class TextWork:
    """Whole text files as documents, tokenized in pieces. A position is (document, byte in it)."""

    documents: Sequence[Document]
    tokenizer: TextTokenizer

    def read(self, position: Position = START) -> Iterator[tuple[Position, Placed[TextPiece]]]:
        """Batches of about BATCH_CHARACTERS; raises DataError for what is not UTF-8."""
        return _batches(self._pieces(position), lambda piece: len(piece.text))

    def _pieces(self, position: Position) -> Iterator[tuple[Position, TextPiece]]:
        first, at = position or (0, 0)
        for number, document in enumerate(self.documents[first:], first):
            begins = not at
            for text in pieces(replace(document, start=document.start + at), self.tokenizer.in_pieces):
                size = len(text) if text.isascii() else len(text.encode())
                at += size
                yield (number, at), TextPiece(text, size, begins)
                begins = False
            yield (number + 1, 0), TextPiece("", 0, ends=True)
            at = 0

    def encode(self, batch: Placed[TextPiece]) -> TokenBatch:
        """The ids of all pieces, with what begins and ends a text around each document."""
        begin, end, ids = self.tokenizer.begin_ids, (self.tokenizer.eos_token_id,), []
        texts = [piece.text for _, piece in batch]
        found = self.tokenizer.encoder.encode_batch_fast(texts, add_special_tokens=False)
        for (_, piece), code in zip(batch, found, strict=True):
            around = begin if piece.begins else end if piece.ends else ()
            ids.append(np.array([*around, *code.ids] if around else code.ids, np.int32))
        stops = np.cumsum([len(part) for part in ids])[[piece.ends for _, piece in batch]]
        return TokenBatch(TokenSpan(np.concatenate(ids), None, stops), sum(piece.num_bytes for _, piece in batch))


@dataclass(frozen=True, eq=False)
class RowWork:
    """Rows, each a document (or several) as the encoder makes it; `most` are tokenized together."""

    rows: RowSequence
    encoder: Encoder
    most: int = BATCH_ROWS

    def read(self, position: Position = START) -> Iterator[tuple[Position, Placed[Row]]]:
        """Batches of about BATCH_CHARACTERS, and at most `most` rows."""
        return _batches(self.rows.read(position), _characters, self.most)

    def encode(self, batch: Placed[Row]) -> TokenBatch:
        """The ids of all rows that can be used, and what is wrong with the others, both in their order."""
        return encode_rows(self.encoder, batch)


def encode_rows(encoder: Encoder, batch: Placed[Row]) -> TokenBatch:
    """The tokens of rows, by a copy of the encoder."""
    encoder = encoder.copied()
    bad = [row for _, row in batch if isinstance(row, BadRow)]
    documents = encoder.encode([row for _, row in batch if isinstance(row, Record)], bad)
    order = {row.place: number for number, (_, row) in enumerate(batch)}
    bad.sort(key=lambda row: order[row.place])
    trained = None
    if any(document.trained is not None for document in documents):
        trained = np.concatenate([np.ones(len(d.ids), bool) if d.trained is None else d.trained for d in documents])
    ids = np.concatenate([np.zeros(0, np.int32), *(document.ids for document in documents)])
    stops = np.cumsum([len(document.ids) for document in documents], dtype=np.int64)
    positions = [batch[order[document.place]][0] for document in documents]
    return TokenBatch(TokenSpan(ids, trained, stops), 0, encoder.counts, bad, positions)


def _batches(
    items: Iterator[tuple[Position, T]], size: Callable[[T], int], most: int = sys.maxsize
) -> Iterator[tuple[Position, Placed[T]]]:
    """Items of about BATCH_CHARACTERS in all, at most this many."""
    batch, characters = Placed[T](), 0
    for after, item in items:
        batch.append((after, item))
        characters += size(item)
        if characters >= BATCH_CHARACTERS or len(batch) == most:
            yield after, batch
            batch, characters = [], 0
    if batch:
        yield batch[-1][0], batch


def _characters(value: Any) -> int:
    """About how much text there is in a row."""
    match value:
        case Record():
            return _characters(value.value)
        case str() | [int(), *_]:
            return len(value)
        case dict():
            return sum(map(_characters, value.values()))
        case list():
            return sum(map(_characters, value))
    return 1


class Workers:
    """Processes that encode rows, one for each thread that calls `start`. They do not hear Ctrl-C, and end when their
    pipe does: with `close`, or with this process."""

    def __init__(self, encoder: Encoder) -> None:
        self._again = encoder.again
        self._idle = SimpleQueue[tuple["subprocess.Popen[bytes]", Connection]]()

    def start(self) -> None:
        """One more."""
        pipe, theirs = Pipe()
        # It imports what this process would, and nothing of the folder in which it happens to be.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({theirs.fileno()})"
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        about: dict[str, Any] = {"env": environment, "pass_fds": [theirs.fileno()], "start_new_session": True}
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, **about)
        theirs.close()
        pipe.send(self._again)
        self._idle.put((process, pipe))

    def encode(self, batch: Placed[Row]) -> TokenBatch:
        """As `encode_rows`, in one of the processes; LlmqError if that ends."""
        process, pipe = self._idle.get()
        try:
            pipe.send(batch)
            found: TokenBatch = pipe.recv()
        except (EOFError, OSError):
            raise LlmqError(
                f"a process that tokenized rows has ended (exit code {process.wait()}): if memory ran out, "
                "TOKENIZERS_PARALLELISM=false does without"
            ) from None
        finally:
            self._idle.put((process, pipe))
        return found

    def close(self) -> None:
        """Ends them all, when nothing waits for them."""
        while not self._idle.empty():
            process, pipe = self._idle.get()
            pipe.close()
            process.wait()


def serve(descriptor: int) -> None:
    """What a process of Workers does: it encodes the batches that come through a pipe until the pipe ends."""
    pipe = Connection(descriptor)
    with suppress(EOFError, BrokenPipeError):
        encoder: Encoder = pipe.recv()()
        while True:
            pipe.send(encode_rows(encoder, pipe.recv()))


def tokenized(
    work: Work, position: Position = START, processes: int = 1
) -> Generator[tuple[Position, TokenBatch], None, None]:
    """The tokens of each batch of `work` after `position`, as a stream has them; closing it ends its threads.

    More than FEW batches of rows are tokenized by this many `processes`, unless that is 1. Raises what reading or
    encoding raises, in the place of the batch where it happened.
    """
    # One batch at a time where the tokenizers library is set to use one thread.
    single = os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("off", "false", "f", "no", "n", "0")
    batches, encode, workers = work.read(position), work.encode, None
    if isinstance(work, RowWork) and processes > 1 and not single:
        first = list(islice(batches, FEW + 1))
        batches = chain(first, batches)
        if len(first) > FEW:
            workers = Workers(work.encoder)
            encode = workers.encode
    at_once = processes if workers else 1 if single else AT_ONCE
    pool = ThreadPoolExecutor(at_once, "llmq-tokenize", workers.start if workers else None)
    results = ((after, pool.submit(encode, batch)) for after, batch in batches)
    try:
        with ReadAhead(results, at_once) as ahead:
            for after, result in ahead:
                yield after, result.result()
    finally:
        pool.shutdown(cancel_futures=True)
        if workers:
            workers.close()
