"""Token files in the making: in parts of bounded size, and resumable after any end of the process.

Everything is written in a folder of its own. Its state.json says up to where, and when it was begun; an interrupted run
that is asked for the same (by the key of all that the files are made from, but for that time) goes on there, and the
files have the bytes that they would have had.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from llmq.data.chat.counts import Counts
from llmq.data.rows.file_rows import START, Position
from llmq.data.rows.records import BadRows
from llmq.data.tokens.pipeline import TokenBatch, Work, tokenized
from llmq.data.tokens.token_file import TokenWriter, partial_name
from llmq.disk import storage, write_whole
from llmq.errors import DataError

PART_TOKENS = 100_000_000  # llm.q's: a part ends with the first document that reaches it
SAVE_EVERY_S = 5.0
STATE = "state.json"


@dataclass(frozen=True)
class TokenStream:
    """Documents in order, and the files that they fill: `first` tokens in `first_name`, the others in parts of `name`.

    No part is begun behind `limit` tokens in all. One part is `name`.bin, unless files are `numbered` in any case.
    """

    name: str
    work: Work[Any, TokenBatch]
    has_masks: bool = False
    first_name: str | None = None
    first: int = 0
    limit: int | None = None
    numbered: bool = False
    whole: bool = False  # one part, whatever its size


@dataclass
class StreamProgress:
    """How far a stream is."""

    counts: Counts = field(default_factory=Counts)
    num_bytes: int = 0  # of text files
    bad: int = 0  # rows left out

    def to_json(self) -> dict[str, Any]:
        counts = {**vars(self.counts), "end_tokens": sorted(self.counts.end_tokens)}
        return {"counts": counts, "num_bytes": self.num_bytes, "bad": self.bad}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> StreamProgress:
        counts = Counts(**{**value["counts"], "end_tokens": set(value["counts"]["end_tokens"])})
        return cls(counts, value["num_bytes"], value["bad"])


@dataclass(frozen=True)
class Made:
    """A finished part, by its final name."""

    name: str
    num_tokens: int
    num_documents: int


OnProgress = Callable[[int, StreamProgress], None]


def begun_at(folder: Path, key: str) -> datetime | None:
    """When the run in `folder` that can be gone on with was begun; None if there is none for `key`."""
    state = _read_state(folder, key)
    return None if state is None else datetime.fromisoformat(state["begun"])


def _read_state(folder: Path, key: str) -> dict[str, Any] | None:
    try:
        state = json.loads((folder / STATE).read_bytes())
        if state["key"] == key and datetime.fromisoformat(state["begun"]):
            return dict(state)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


class Producer:
    """Makes the files of several streams in `folder`, one stream after the other; `begun` says when that began."""

    def __init__(
        self,
        folder: Path,
        key: str,
        *,
        vocab_size: int,
        tokenizer_sha256: str,
        skip_bad_rows: int,
        progress: OnProgress,
        begun: datetime,
    ) -> None:
        self.folder, self.key, self.progress = folder, key, progress
        self.about: dict[str, Any] = {"vocab_size": vocab_size, "tokenizer_sha256": tokenizer_sha256}
        self.skip_bad_rows = skip_bad_rows
        known = _read_state(folder, key)
        if known is None:
            self.clear()
        self.resumed = known is not None
        self._state = known or {"key": key, "begun": begun.isoformat(), "streams": []}

    def clear(self) -> None:
        """Removes everything that was made."""
        if self.folder.exists():
            with storage(self.folder):
                shutil.rmtree(self.folder)

    @property
    def was_saved(self) -> bool:
        """Whether there is something to go on from."""
        return (self.folder / STATE).exists()

    def run(self, streams: Sequence[TokenStream]) -> list[tuple[list[Made], StreamProgress]]:
        """The parts and counts of each stream, under their final names in the folder."""
        results: list[tuple[list[Made], StreamProgress]] = []
        for number, stream in enumerate(streams):
            known = self._state["streams"][number] if number < len(self._state["streams"]) else None
            making = _Making(self, number, stream, known)
            if not making.finished:
                making.run(bad_before=sum(done.bad for _, done in results))
            results.append((making.named(), making.done))
        with storage(self.folder):
            for path in self.folder.iterdir():
                if path.name.startswith("."):  # what the writers of published parts left after a kill
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        return results

    def save(self, number: int, state: dict[str, Any]) -> None:
        """Makes durable how far stream `number` is."""
        self._state["streams"][number:] = [state]
        write_whole(self.folder / STATE, json.dumps(self._state).encode())


class _Making:
    """One stream on its way into files."""

    def __init__(self, producer: Producer, number: int, stream: TokenStream, known: dict[str, Any] | None) -> None:
        self.producer, self.number, self.stream = producer, number, stream
        known = known or {}
        self.position: Position = tuple(known.get("position", START))
        self.parts = [Made(**part) for part in known.get("parts", [])]
        self.done = StreamProgress.from_json(known["progress"]) if known else StreamProgress()
        self.finished = bool(known.get("finished"))
        self.writer: TokenWriter | None = None
        self.sealed: list[TokenWriter] = []
        for part in self.parts:  # sealed when the state was saved, but perhaps not renamed yet
            path = producer.folder / part.name
            if partial_name(path).exists():
                with storage(path):
                    os.replace(partial_name(path), path)
        if "writer" in known:
            self.writer = TokenWriter.resume(producer.folder / self._name(), known["writer"])

    def run(self, *, bad_before: int) -> None:
        """Tokenizes to the end of the stream or its limit; `bad_before` rows of other streams were left out."""
        bad = BadRows(self.producer.skip_bad_rows, bad_before + self.done.bad)
        saved = time.monotonic()
        try:
            with closing(tokenized(self.stream.work, self.position)) as batches:
                for tokens in batches:
                    for row in tokens.bad:
                        bad.add(row)
                    self._count(tokens)
                    more = self._append(tokens)
                    self.position = tokens.position
                    self.producer.progress(self.number, self.done)
                    if self.sealed or time.monotonic() - saved >= SAVE_EVERY_S:
                        self._save()
                        saved = time.monotonic()
                    if not more:
                        break
            if self.writer is not None:
                self._seal()
            self.finished = True
            self._save()
        finally:
            if self.writer is not None:
                self.writer.close()

    def _count(self, tokens: TokenBatch) -> None:
        # What is written is counted there: not all of the last batch may be.
        self.done.counts.add(replace(tokens.counts, documents=0, tokens=0, trained=0))
        self.done.num_bytes += tokens.num_bytes
        self.done.bad += len(tokens.bad)

    def _append(self, tokens: TokenBatch) -> bool:
        """Writes a batch, in several parts where one is full; returns whether there is room for more."""
        begin = 0
        while True:
            room = self._room()
            index = len(tokens.stops)
            if room is not None:
                index = int(np.searchsorted(tokens.stops, begin + room))
            if index == len(tokens.stops):
                self._write(tokens, begin, len(tokens.ids))
                return True
            stop = int(tokens.stops[index])
            self._write(tokens, begin, stop)
            self._seal()
            if self.stream.limit is not None and self.done.counts.tokens >= self.stream.limit:
                return False
            begin = stop

    def _room(self) -> int | None:
        """Tokens until the part is full, not above 0 inside a document that fills it. None: it never is."""
        if self.stream.first_name is not None and not self.parts:
            size = self.stream.first
        elif self.stream.whole:
            return None
        else:
            size = min(PART_TOKENS, self.stream.limit or PART_TOKENS)
        return size - (self.writer.num_tokens if self.writer is not None else 0)

    def _write(self, tokens: TokenBatch, start: int, stop: int) -> None:
        if start == stop:
            return
        masks = self.stream.has_masks
        if self.writer is None:
            path = self.producer.folder / self._name()
            self.writer = TokenWriter(path, has_masks=masks, resumable=True, **self.producer.about)
        assert masks or tokens.trained is None
        mask = None
        if masks:
            mask = np.ones(stop - start, bool) if tokens.trained is None else tokens.trained[start:stop]
        inside = (tokens.stops > start) & (tokens.stops <= stop)
        self.writer.append(tokens.ids[start:stop], mask, stops=tokens.stops[inside] - start)
        self.done.counts.tokens += stop - start
        self.done.counts.documents += int(inside.sum())
        self.done.counts.trained += stop - start if mask is None else int(mask.sum())

    def _seal(self) -> None:
        assert self.writer is not None
        self.writer.seal()
        self.parts.append(Made(self._name(), self.writer.num_tokens, self.writer.num_documents))
        self.sealed.append(self.writer)
        self.writer = None

    def _save(self) -> None:
        """The state first, then the names: a part that the state does not know is made again."""
        state: dict[str, Any] = {
            "position": list(self.position),
            "parts": [asdict(part) for part in self.parts],
            "progress": self.done.to_json(),
            "finished": self.finished,
        }
        if self.writer is not None:
            state["writer"] = self.writer.state()
        self.producer.save(self.number, state)
        for writer in self.sealed:
            writer.publish()
        self.sealed = []

    def _name(self) -> str:
        """Where the part that is being written lies, for now."""
        before = self.stream.first_name is not None
        if before and not self.parts:
            return f"{self.stream.first_name}.bin"
        return f"{self.stream.name}-{len(self.parts) - before:03d}.bin"

    def named(self) -> list[Made]:
        """The parts by their final names, which are given here."""
        before = int(self.stream.first_name is not None)
        if self.stream.numbered or len(self.parts) - before != 1:
            return self.parts
        only = replace(self.parts[before], name=f"{self.stream.name}.bin")
        path = self.producer.folder / self.parts[before].name
        if path.exists():  # else an earlier run, which was killed behind this, has done it
            with storage(path):
                os.replace(path, self.producer.folder / only.name)
        return [*self.parts[:before], only]


def require_trained(what: str, done: StreamProgress, advice: str = "") -> None:
    """DataError, with what else could be done as `advice`, unless there is a document with a trained token."""
    if done.counts.trained:
        return
    counts = done.counts
    left = f", {done.bad} bad rows left out" if done.bad else ""
    if counts.too_long:
        left += f", {counts.too_long} of {counts.rows} rows are too long: --seq-len {counts.longest} keeps all"
    if counts.untrained or (counts.rows and not counts.too_long):
        left += f", {counts.untrained} of {counts.rows} rows have no trained token"
    raise DataError(
        f"{what} has not one token that would be trained ({done.counts.documents} documents{left}): give data with "
        "text, change --train-on, or check which fields are mapped (--map)" + advice
    )
