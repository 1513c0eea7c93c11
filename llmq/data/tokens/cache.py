"""What is kept between runs: names for it by content, a lock for its maker, what is in it, and hashes of large files.

A folder of the cache appears whole, by a rename. While it is made, its maker holds a lock, which ends with its process;
other processes that want the same folder wait.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import BaseModel, Field, ValidationError

from llmq.data.chat.encoded import Counts
from llmq.data.stream import START, Position
from llmq.disk import cache_folder, reading, storage, write_whole
from llmq.errors import StorageError

MANIFEST = "manifest.json"
PART_TOKENS = 100_000_000  # llm.q's: a part ends with the first document that reaches it
REMEMBERED_BYTES = 1 << 26  # a smaller file is hashed again sooner than a note of its hash is written


def key_of(identity: Any) -> str:
    """A name for `identity`, any JSON value: 24 hex digits of its SHA-256."""
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


@contextmanager
def locked(path: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock file `path`; calls `on_wait` with a line of text if another process or thread holds it.

    The file is gone afterwards. StorageError if it cannot be made, or the file system has no locks.
    """
    lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    advice = "choose a folder on another disk, for the cache with LLMQ_CACHE_DIR"
    with storage(path, "cannot be written or locked", advice=advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            on_wait(f"another process is working in {path.parent}: waiting for it to finish")
            lock.acquire()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # still held, so that no other process has just taken it
        lock.release()


def content_hash(path: Path) -> str:
    """SHA-256 of a file, in hex. That of a large one is remembered for as long as its size and times stay the same."""
    with reading(path, "check the file and the disk"):
        found = path.stat()
        state = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
        note = cache_folder("hashes") / f"{key_of([str(path.absolute())])}.json"
        known = json_or_none(note) if found.st_size >= REMEMBERED_BYTES else None
        if isinstance(known, dict) and known.get("state") == state:
            return str(known["sha256"])
        digest = hashlib.sha256()
        with path.open("rb", 0) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    # A file that is written to within the clock's resolution keeps its times, so young ones are not remembered.
    is_old = time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > 2_000_000_000
    if is_old and found.st_size >= REMEMBERED_BYTES:
        with suppress(StorageError):  # without a cache to write to, the file is read again the next time
            write_whole(note, json.dumps({"sha256": digest.hexdigest(), "state": state}).encode())
    return digest.hexdigest()


def json_or_none(path: Path) -> Any:
    """What a JSON file of ours holds; None where it is absent or damaged, which costs only time."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


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

    @property
    def parts(self) -> list[FinishedPart]:
        """Those of all streams."""
        return [part for stream in self.streams for part in stream.parts]

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
        is_there = found and found.key == key and all((folder / part.name).exists() for part in found.parts)
        return found if is_there else None

    def write(self, folder: Path) -> None:
        """Puts it in `folder`, whole and durably."""
        write_whole(folder / MANIFEST, self.model_dump_json(indent=1).encode())


def is_whole(entry: Path) -> bool:
    """Whether a folder of the cache is there with all the files that were made."""
    manifest = Manifest.read(entry)
    sizes = manifest.files if manifest is not None else {}
    try:
        return bool(sizes) and all((entry / name).stat().st_size == size for name, size in sizes.items())
    except OSError:
        return False
