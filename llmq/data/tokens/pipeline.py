"""From text and rows to token ids, in order, and to token files in parts of bounded size.

One thread reads ahead, and batches are tokenized two at a time. The tokenizers library works on a batch with all cores
and without Python's lock; what Python does for a batch of text (reading it, making arrays of ids) is done meanwhile for
its neighbours. For rows Python does much more (templates, masks), so that many rows are tokenized by as many
processes as there are cores.

Files are written in a folder of their own, with a manifest that names the finished parts, which outlive the process. An
interrupted run that is asked for the same (by the key of all that the files are made from) continues after the last
finished part, and the files have the bytes that they would have had.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from multiprocessing.connection import Connection, Pipe
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from llmq.data.chat.encode import Encoder
from llmq.data.chat.encoded import Counts
from llmq.data.rows.row_files import BadRow, BadRows, Record, Row, RowSequence
from llmq.data.stream import START, Position, ReadAhead
from llmq.data.tokens.cache import FinishedPart, Manifest, StreamProgress
from llmq.data.tokens.text import Document, pieces
from llmq.data.tokens.token_file import TokenWriter
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.disk import storage
from llmq.errors import LlmqError
from llmq.hardware.cores import num_cores

BATCH_CHARACTERS = 1 << 19  # tokenized at once: the library holds some 25 MB meanwhile
BATCH_ROWS = 2048
AT_ONCE = 2  # batches: while one of them ends with less work than there are cores, the other has some
FEW = 3  # batches of rows, of about a second each: a process takes longer than that to begin
MOST_PROCESSES = 16
PART_TOKENS = 100_000_000  # llm.q's: a part ends with the first document that reaches it
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
        masks = (np.ones(len(d.ids), bool) if d.trained is None else d.trained for d in documents)
        trained = np.concatenate(list(masks))
    ids = np.concatenate([np.zeros(0, np.int32), *(document.ids for document in documents)])
    stops = np.cumsum([len(document.ids) for document in documents], dtype=np.int64)
    positions = [batch[order[document.place]][0] for document in documents]
    return TokenBatch(TokenSpan(ids, trained, stops), 0, encoder.counts, bad, positions)


def _batches(
    items: Iterator[tuple[Position, T]], size: Callable[[T], int], most: int = sys.maxsize
) -> Iterator[tuple[Position, Placed[T]]]:
    """Items of about BATCH_CHARACTERS in all, at most so many."""
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

    More than FEW batches of rows are tokenized by so many `processes`, unless that is 1. Raises what reading or
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


@dataclass(frozen=True)
class TokenStream:
    """Documents in order, and the files that they fill: the first `eval_tokens` in eval.bin, the others in parts.

    No part is begun after `limit` tokens in all. One part is `name`.bin, unless files are `numbered` in any case.
    """

    name: str
    work: Work
    has_masks: bool = False
    eval_tokens: int = 0
    limit: int | None = None
    numbered: bool = False
    whole: bool = False  # one part, whatever its size


@dataclass
class Producer:
    """Makes the files of several streams in `folder`, one stream after the other, from where `manifest` says."""

    folder: Path
    manifest: Manifest
    tokenizer: TextTokenizer
    skip_bad_rows: int
    on_progress: Callable[[Sequence[StreamProgress]], None]
    writer: TokenWriter | None = None  # of the part that is being written

    def run(self, streams: Sequence[TokenStream]) -> list[StreamProgress]:
        """The finished streams."""
        done = self.manifest.streams
        done += [StreamProgress() for _ in streams[len(done) :]]
        for self.stream, self.done in zip(streams, done, strict=True):
            if not self.done.finished:
                self._fill(BadRows(self.skip_bad_rows, sum(progress.bad for progress in done)))
        return done

    def _fill(self, bad: BadRows) -> None:
        """Tokenizes to the end of the stream or its limit."""
        done = self.done
        try:
            processes = min(num_cores(), MOST_PROCESSES)
            with closing(tokenized(self.stream.work, done.position, processes)) as batches:
                for position, batch in batches:
                    for row in batch.bad:
                        bad.add(row)
                    has_room = self._append(batch.tokens)
                    done.position, done.skipped = position, max(done.skipped - len(batch.tokens.ids), 0)
                    done.rows.add(batch.counts)
                    done.num_bytes += batch.num_bytes
                    done.bad += len(batch.bad)
                    self.on_progress(self.manifest.streams)
                    if not has_room:
                        break
            self._end_part()
        finally:
            if self.writer is not None:
                self.writer.discard()
                self.writer = None
        if not self.stream.numbered and len(done.parts) == 1 + bool(self.stream.eval_tokens):
            # the only part that has a number needs none
            numbered, done.parts[-1].name = done.parts[-1].name, f"{self.stream.name}.bin"
            with storage(self.folder):
                os.replace(self.folder / numbered, self.folder / done.parts[-1].name)
        done.finished = True
        self.manifest.write(self.folder)

    def _append(self, tokens: TokenSpan) -> bool:
        """Writes a batch, in several parts where one is full; returns whether there is room for more."""
        stream, done, start = self.stream, self.done, min(self.done.skipped, len(tokens.ids))
        while True:
            size = sys.maxsize >> 1 if stream.whole else min(PART_TOKENS, stream.limit or PART_TOKENS)
            if stream.eval_tokens and not done.parts:
                size = stream.eval_tokens
            room = size - (self.writer.num_tokens if self.writer is not None else 0)
            index = int(np.searchsorted(tokens.stops, start + room))  # of the document with which the part is full
            is_full = index < len(tokens.stops)
            stop = int(tokens.stops[index]) if is_full else len(tokens.ids)
            if start < stop:
                number = len(done.parts) - bool(stream.eval_tokens)
                path = self.folder / ("eval.bin" if number < 0 else f"{stream.name}-{number:03d}.bin")
                vocab_size, sha256 = self.tokenizer.vocab_size, self.tokenizer.sha256
                self.writer = self.writer or TokenWriter(path, vocab_size, stream.has_masks, sha256)
                self.writer.append(*tokens.part(start, stop))
            if not is_full:
                return True
            self._end_part()
            start = done.skipped = stop
            self.manifest.write(self.folder)
            if stream.limit is not None and done.num_tokens >= stream.limit:
                return False

    def _end_part(self) -> None:
        if (writer := self.writer) is not None:
            writer.finish()
            self.writer = None
            counts = {name: getattr(writer, name) for name in ("num_tokens", "num_documents", "num_trained")}
            self.done.parts.append(FinishedPart(name=writer.path.name, **counts))
