"""What is kept between runs: downloads, and data that was tokenized once, by the hash of all that it was made from.

A folder of the cache appears whole, by a rename. While it is made, its maker holds a lock of the operating system,
which ends with the process however that ends; who wants the same folder meanwhile waits.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llmq.cache_folder import cache_folder
from llmq.disk import reading, storage, write_whole
from llmq.errors import StorageError

POLL_S = 0.1
BLOCK_BYTES = 1 << 20
REMEMBERED_BYTES = 1 << 26  # a smaller file is hashed again sooner than a note of its hash is written


def key_of(identity: Any) -> str:
    """A name for `identity`, which is anything that JSON knows: 24 hex digits of its SHA-256."""
    text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


@contextmanager
def locked(path: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock file `path`, alone on this machine; `on_wait` is told once who has it, if somebody does.

    The file is gone afterwards. StorageError if it cannot be made.
    """
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    told = False
    while True:
        with storage(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            while not _taken(fd, path):
                if not told:
                    holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "?"
                    on_wait(f"process {holder} is at work in {path.parent}: waiting until it is done")
                    told = True
                time.sleep(POLL_S)
            if not _is_at(fd, path):  # the one before removed it while we waited
                continue
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(fd)


def _taken(fd: int, path: Path) -> bool:
    no_locks = storage(
        path,
        "this file system locks no files",
        kept=f", so two processes could write to {path.parent} at once",
        advice="choose a folder on another disk, for the cache with LLMQ_CACHE_DIR",
    )
    with no_locks:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            path.unlink(missing_ok=True)
            raise
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def content_hash(path: Path) -> str:
    """SHA-256 of a file, in hex. That of a large one is remembered for as long as its size and times stay the same."""
    with reading(path, "check the file and the disk"):
        found = path.stat()
        state = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
        note = cache_folder("hashes") / f"{key_of([str(path.absolute())])}.json"
        known = _json(note) if found.st_size >= REMEMBERED_BYTES else None
        if isinstance(known, dict) and known.get("state") == state:
            return str(known["sha256"])
        digest = hashlib.sha256()
        with path.open("rb", 0) as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    # A file that is written to within the clock's resolution keeps its times, so young ones are not remembered.
    is_old = time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > 2_000_000_000
    if is_old and found.st_size >= REMEMBERED_BYTES:
        with suppress(StorageError):  # without a cache to write to, the file is read again the next time
            write_whole(note, json.dumps({"sha256": digest.hexdigest(), "state": state}).encode())
    return digest.hexdigest()


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
