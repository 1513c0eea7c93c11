"""What is kept between runs: names for it by content, a lock for its maker, and hashes of large files.

A folder of the cache appears whole, by a rename. While it is made, its maker holds a lock, which ends with its process;
other processes that want the same folder wait.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from llmq.disk import cache_folder, reading, storage, write_whole
from llmq.errors import StorageError

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
