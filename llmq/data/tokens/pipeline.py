"""From text and rows to token ids, in order.

One thread reads ahead, and batches are tokenized two at a time. The tokenizers library works on a batch with all cores
and without Python's lock; what Python does for a batch of text (reading it, making arrays of ids) is done meanwhile for
its neighbours. For rows Python does much more (templates, masks), so that many rows are tokenized by a process for
each core, of which this one is the first: it has work to do while the others start.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, islice
from multiprocessing.connection import Connection, Pipe
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from llmq.data.chat.encode import Encoder
from llmq.data.chat.encoded import Counts
from llmq.data.rows.row_files import BadRow, JsonLine, Record, Row
from llmq.data.rows.row_sequences import RowSequence, parsed
from llmq.data.stream import START, Position, ReadAhead
from llmq.data.tokens.text import Document, pieces
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.errors import LlmqError
from llmq.hardware.cores import num_cores

BATCH_CHARACTERS = 1 << 19  # tokenized at once: the library holds some 25 MB meanwhile
ROWS_CHARACTERS = 1 << 17  # of a batch of rows, so that processes end together
BATCH_ROWS = 2048
AT_ONCE = 2  # batches: while one of them ends with less work than there are cores, the other has some
FEW = 12  # batches of rows, of about a quarter of a second each: a process takes some four times as long to begin
MOST_PROCESSES = 16
AHEAD = 4  # batches for each process: what is done while the first of another one waits for it to begin
SWITCH_S = 5e-4  # for which a thread keeps others from what came through a pipe, while it encodes rows here
T = TypeVar("T")
Placed = list[tuple[Position, T]]  # pieces of text or rows, with the position after each
AnyRow = Row | JsonLine


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
        return _batches(self._pieces(position), lambda piece: len(piece.text), BATCH_CHARACTERS)

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

    def read(self, position: Position = START) -> Iterator[tuple[Position, Placed[AnyRow]]]:
        """Batches of about ROWS_CHARACTERS, and at most `most` rows."""
        return _batches(self.rows.unparsed(position), _characters, ROWS_CHARACTERS, self.most)

    def encode(self, batch: Placed[AnyRow]) -> TokenBatch:
        """The ids of all rows that can be used, and what is wrong with the others, both in their order."""
        return encode_rows(self.encoder, batch)


def encode_rows(encoder: Encoder, batch: Placed[AnyRow]) -> TokenBatch:
    """The tokens of rows, by a copy of the encoder."""
    encoder, rows = encoder.copied(), [parsed(row) for _, row in batch]
    bad = [row for row in rows if isinstance(row, BadRow)]
    documents = encoder.encode([row for row in rows if isinstance(row, Record)], bad)
    order = {row.place: number for number, row in enumerate(rows)}
    bad.sort(key=lambda row: order[row.place])
    trained = None
    if any(document.trained is not None for document in documents):
        trained = np.concatenate([np.ones(len(d.ids), bool) if d.trained is None else d.trained for d in documents])
    ids = np.concatenate([np.zeros(0, np.int32), *(document.ids for document in documents)])
    stops = np.cumsum([len(document.ids) for document in documents], dtype=np.int64)
    positions = [batch[order[document.place]][0] for document in documents]
    return TokenBatch(TokenSpan(ids, trained, stops), 0, encoder.counts, bad, positions)


def _batches(
    items: Iterator[tuple[Position, T]], size: Callable[[T], int], enough: int, most: int = sys.maxsize
) -> Iterator[tuple[Position, Placed[T]]]:
    """Items of about `enough` characters in all, at most this many."""
    batch, characters = Placed[T](), 0
    for after, item in items:
        batch.append((after, item))
        characters += size(item)
        if characters >= enough or len(batch) == most:
            yield after, batch
            batch, characters = [], 0
    if batch:
        yield batch[-1][0], batch


def _characters(value: Any) -> int:
    """About how much text there is in a row."""
    match value:
        case JsonLine():
            return len(value.line)
        case Record():
            return _characters(value.value)
        case str() | [int(), *_]:
            return len(value)
        case dict():
            return sum(map(_characters, value.values()))
        case list():
            return sum(map(_characters, value))
    return 1


class Worker:
    """A process that encodes rows. It does not hear Ctrl-C, and ends when its pipe does, or with this process."""

    def __init__(self, encoder: Encoder) -> None:
        self._pipe, theirs = Pipe()
        # It imports what this process would, and nothing of the folder in which it happens to be.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({theirs.fileno()})"
        # One thread of the library rather than none: text takes a quarter longer in the thread that calls it.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "1"}
        about: dict[str, Any] = {"env": environment, "pass_fds": [theirs.fileno()], "start_new_session": True}
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, **about)
        theirs.close()
        with suppress(OSError):  # of a process that has ended: `encode` says so
            self._pipe.send(encoder.again)

    def encode(self, batch: Placed[AnyRow]) -> TokenBatch:
        """As `encode_rows`; LlmqError if the process ends."""
        try:
            self._pipe.send(batch)
            found: TokenBatch = self._pipe.recv()
        except (EOFError, OSError):
            raise LlmqError(
                f"a process that tokenized rows has ended (exit code {self._process.wait()}): if memory ran out, "
                "TOKENIZERS_PARALLELISM=false does without"
            ) from None
        return found

    def close(self) -> None:
        """Ends it."""
        self._pipe.close()
        self._process.wait()


class Workers:
    """This process and others that encode rows, `count` in all; the others start as they are needed. `close` ends
    them, when nothing waits for them."""

    def __init__(self, encoder: Encoder, count: int) -> None:
        self._encoder, self.count = encoder, count
        self._started: list[Worker] = []
        self._idle = SimpleQueue[Callable[[Placed[AnyRow]], TokenBatch]]()
        self._idle.put(partial(encode_rows, encoder))

    @property
    def has_begun(self) -> bool:
        """Whether there are other processes."""
        return bool(self._started)

    def encode(self, batch: Placed[AnyRow]) -> TokenBatch:
        """As `encode_rows`; LlmqError if the process ends. At most `count` threads call it at a time."""
        try:
            encode = self._idle.get_nowait()
        except Empty:
            worker = Worker(self._encoder)
            self._started.append(worker)
            encode = worker.encode
        try:
            return encode(batch)
        finally:
            self._idle.put(encode)

    def close(self) -> None:
        for worker in self._started:
            worker.close()


@contextmanager
def workers_for(encoder: Encoder | None) -> Iterator[Workers | None]:
    """Within, workers for all cores of this process; None for text, one core, and a library set to use one thread."""
    count = 1 if _is_single() else min(num_cores(), MOST_PROCESSES)
    if encoder is None or count == 1:
        yield None
        return
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with closing(Workers(encoder, count)) as workers:
            yield workers
    finally:
        sys.setswitchinterval(interval)


def _is_single() -> bool:
    """Whether the tokenizers library is set to use one thread."""
    return os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("off", "false", "f", "no", "n", "0")


def serve(descriptor: int) -> None:
    """What a process of Workers does: it encodes the batches that come through a pipe until the pipe ends."""
    pipe = Connection(descriptor)
    with suppress(EOFError, BrokenPipeError):
        encoder: Encoder = pipe.recv()()
        # What a batch leaves is freed as it goes; looking for cycles among all that lives on took a tenth of the time.
        gc.freeze()
        gc.set_threshold(100_000)
        while True:
            pipe.send(encode_rows(encoder, pipe.recv()))


def tokenized(
    work: Work, position: Position = START, workers: Workers | None = None
) -> Generator[tuple[Position, TokenBatch], None, None]:
    """The tokens of each batch of `work` after `position`, as a stream has them; closing it ends its threads.

    More than FEW batches of rows are tokenized by `workers`, if there are any. Raises what reading or encoding raises,
    in the place of the batch where it happened.
    """
    batches, encode, at_once = work.read(position), work.encode, 1 if _is_single() else AT_ONCE
    num_ahead = at_once
    if workers is not None:
        first = list(islice(batches, FEW + 1))
        batches = chain(first, batches)
        if workers.has_begun or len(first) > FEW:
            encode, at_once, num_ahead = workers.encode, workers.count, AHEAD * workers.count
    pool = ThreadPoolExecutor(at_once, "llmq-tokenize")
    results = ((after, pool.submit(encode, batch)) for after, batch in batches)
    try:
        with ReadAhead(results, num_ahead) as ahead:
            for after, result in ahead:
                yield after, result.result()
    finally:
        pool.shutdown(cancel_futures=True)
