"""Writes token files in parts of bounded size, of which the finished ones outlive the process.

Everything is written in a folder of its own, with a manifest that names the finished parts. An interrupted run that is
asked for the same (by the key of all that the files are made from) continues after the last finished part, and the
files have the bytes that they would have had.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from llmq.data.chat.counts import Counts
from llmq.data.rows.records import BadRows
from llmq.data.stream import START, Position
from llmq.data.tokens.pipeline import TokenBatch, Work, tokenized
from llmq.data.tokens.token_file import TokenWriter
from llmq.disk import storage, write_whole
from llmq.errors import DataError

PART_TOKENS = 100_000_000  # llm.q's: a part ends with the first document that reaches it
MANIFEST = "manifest.json"


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

    @property
    def num_unnumbered(self) -> int:
        """Parts before the first that has a number."""
        return int(self.eval_tokens > 0)


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
    vocab_size: int
    tokenizer_sha256: str
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
        if not self.stream.numbered and len(done.parts) == 1 + self.stream.num_unnumbered:
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
            self.writer = TokenWriter(
                self.folder / self._name(),
                vocab_size=self.vocab_size,
                has_masks=has_masks,
                tokenizer_sha256=self.tokenizer_sha256,
            )
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
        number = len(self.done.parts) - self.stream.num_unnumbered
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
