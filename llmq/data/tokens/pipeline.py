"""From text and rows to token ids, in order, and to token files in parts of bounded size.

One thread reads ahead, and batches are tokenized two at a time. The tokenizers library works on a batch with all cores
and without Python's lock. What Python does for a batch (reading it, making an array of the ids) is done meanwhile for
its neighbours, so that the cores need not wait for it.

Files are written in a folder of their own, with a manifest that names the finished parts, which outlive the process. An
interrupted run that is asked for the same (by the key of all that the files are made from) continues after the last
finished part, and the files have the bytes that they would have had.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, auto
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from llmq.data.chat.encode import Encoder
from llmq.data.chat.encoded import Counts
from llmq.data.rows.file_rows import RowSequence
from llmq.data.rows.records import BadRow, BadRows, Record, Row
from llmq.data.stream import START, Position, ReadAhead
from llmq.data.tokens.text import Document, pieces
from llmq.data.tokens.token_file import TokenWriter
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.disk import storage, write_whole
from llmq.errors import DataError

BATCH_CHARACTERS = 1 << 19  # tokenized at once: the library holds some 25 MB meanwhile
BATCH_ROWS = 2048
AT_ONCE = 2  # batches: while one of them ends with less work than there are cores, the other has some
READ_AHEAD = 2  # batches that are read or tokenized before they are asked for
PART_TOKENS = 100_000_000  # llm.q's: a part ends with the first document that reaches it
MANIFEST = "manifest.json"


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


class FinishedPart(BaseModel):
    """A finished file."""

    name: str
    num_tokens: int
    num_documents: int
    num_trained: int


class StreamProgress(BaseModel):
    """How far a stream is: its finished parts, and the batch in which the next one begins."""

    parts: list[FinishedPart] = []
    position: Position = START  # where that batch begins
    skipped: int = 0  # tokens at its beginning that are in finished parts
    rows: Counts = Field(default_factory=Counts)  # of the encoder up to there
    num_bytes: int = 0  # of text files, up to there
    bad: int = 0  # rows left out up to there
    finished: bool = False

    @property
    def num_tokens(self) -> int:
        """Those in finished parts."""
        return sum(part.num_tokens for part in self.parts)

    @property
    def counts(self) -> Counts:
        """The counts of a finished stream, of what is in its parts: they may lack documents of the last batch."""
        documents, trained = (sum(getattr(p, name) for p in self.parts) for name in ("num_documents", "num_trained"))
        return replace(self.rows, documents=documents, tokens=self.num_tokens, trained=trained)


class Manifest(BaseModel):
    """What is in a folder of token files: while they are made, how far; then also each file with its size."""

    key: str = ""  # of all that they are made from
    begun: datetime
    streams: list[StreamProgress] = []
    notes: list[str] = []  # on their rows
    files: dict[str, int] = {}

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """That of `folder`; None if there is none that can be read."""
        try:
            return cls.model_validate_json((folder / MANIFEST).read_bytes())
        except (OSError, ValidationError):
            return None

    @classmethod
    def unfinished(cls, folder: Path, key: str) -> Manifest | None:
        """That of an interrupted run for `key`, if the parts that it names are there."""
        found = cls.read(folder)
        parts = [part for stream in found.streams for part in stream.parts] if found is not None else []
        return found if found and found.key == key and all((folder / part.name).exists() for part in parts) else None

    def write(self, folder: Path) -> None:
        """Puts it in `folder`, whole and durably."""
        write_whole(folder / MANIFEST, self.model_dump_json(indent=1).encode())


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
        for number, self.stream in enumerate(streams):
            if number == len(done):
                done.append(StreamProgress())
            self.done = done[number]
            if not self.done.finished:
                self._fill(BadRows(self.skip_bad_rows, sum(progress.bad for progress in done)))
        return done

    def _fill(self, bad: BadRows) -> None:
        """Tokenizes to the end of the stream or its limit."""
        done = self.done
        try:
            with closing(tokenized(self.stream.work, done.position)) as batches:
                for position, tokens in batches:
                    for row in tokens.bad:
                        bad.add(row)
                    has_room = self._append(tokens)
                    done.position, done.skipped = position, max(done.skipped - len(tokens.ids), 0)
                    done.rows.add(tokens.counts)
                    done.num_bytes += tokens.num_bytes
                    done.bad += len(tokens.bad)
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

    def _append(self, tokens: TokenBatch) -> bool:
        """Writes a batch, in several parts where one is full; returns whether there is room for more."""
        start = min(self.done.skipped, len(tokens.ids))
        while (stop := self._part_end(tokens, start)) is not None:
            self._write(tokens, start, stop)
            self._end_part()
            start = self.done.skipped = stop
            self.manifest.write(self.folder)
            if self.stream.limit is not None and self.done.num_tokens >= self.stream.limit:
                return False
        self._write(tokens, start, len(tokens.ids))
        return True

    def _part_end(self, tokens: TokenBatch, start: int) -> int | None:
        """Where in a batch, from its token `start`, the part is full and a document ends; None if nowhere."""
        if self.stream.eval_tokens and not self.done.parts:
            size = self.stream.eval_tokens
        elif self.stream.whole:
            return None
        else:
            size = min(PART_TOKENS, self.stream.limit or PART_TOKENS)
        room = size - (self.writer.num_tokens if self.writer is not None else 0)
        index = int(np.searchsorted(tokens.stops, start + room))
        return int(tokens.stops[index]) if index < len(tokens.stops) else None

    def _write(self, tokens: TokenBatch, start: int, stop: int) -> None:
        if start == stop:
            return
        has_masks = self.stream.has_masks
        if self.writer is None:
            about: dict[str, Any] = {"vocab_size": self.tokenizer.vocab_size, "tokenizer_sha256": self.tokenizer.sha256}
            self.writer = TokenWriter(self.folder / self._name(), has_masks=has_masks, **about)
        assert has_masks or tokens.trained is None
        mask = None
        if has_masks:
            mask = np.ones(stop - start, bool) if tokens.trained is None else tokens.trained[start:stop]
        inside = (tokens.stops > start) & (tokens.stops <= stop)
        self.writer.append(tokens.ids[start:stop], mask, stops=tokens.stops[inside] - start)

    def _end_part(self) -> None:
        if (writer := self.writer) is not None:
            writer.finish()
            self.writer = None
            counts = {name: getattr(writer, name) for name in ("num_tokens", "num_documents", "num_trained")}
            self.done.parts.append(FinishedPart(name=self._name(), **counts))

    def _name(self) -> str:
        """That of the part that is being written."""
        number = len(self.done.parts) - bool(self.stream.eval_tokens)
        return "eval.bin" if number < 0 else f"{self.stream.name}-{number:03d}.bin"


def is_whole(entry: Path) -> bool:
    """Whether a folder of the cache is there with all the files that were made."""
    manifest = Manifest.read(entry)
    sizes = manifest.files if manifest is not None else {}
    try:
        return bool(sizes) and all((entry / name).stat().st_size == size for name, size in sizes.items())
    except OSError:
        return False


def require_trained(what: str, counts: Counts, bad: int = 0, advice: str = "") -> None:
    """DataError, with what else could be done as `advice`, unless there is a document with a trained token."""
    if counts.trained:
        return
    left = f", {bad} bad rows left out" if bad else ""
    if counts.too_long:
        left += f", {counts.too_long} of {counts.rows} rows are too long: --seq-len {counts.longest} keeps all"
    if counts.untrained or (counts.rows and not counts.too_long):
        left += f", {counts.untrained} of {counts.rows} rows have no trained token"
    raise DataError(
        f"{what} has no token to train on ({counts.documents} documents{left}): give data with "
        "text, change --train-on, or check which fields are mapped (--map)" + advice
    )
