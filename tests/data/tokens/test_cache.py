"""The cache: names by content, one maker at a time however it ends, and a memory for hashes that notices changes."""

import errno
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llmq.data.tokens import cache
from llmq.data.tokens.cache import content_hash, key_of, locked
from llmq.disk import cache_folder
from llmq.errors import DataError, StorageError

ROOT = Path(__file__).parents[3]
HOLDER = """
import sys, time
from pathlib import Path
from llmq.data.tokens.cache import locked
with locked(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_key_is_that_of_the_content() -> None:
    assert key_of({"a": 1, "b": [2]}) == key_of({"b": [2], "a": 1}) != key_of({"a": 1, "b": [3]})
    assert len(key_of("\udcff")) == 24


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_refused_with_the_way_out(tmp_path: Path, monkeypatch, number: int) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    says = r"x\.lock: cannot be written or locked \(.*LLMQ_CACHE_DIR"
    with pytest.raises(StorageError, match=says), locked(tmp_path / "x.lock", print):
        pass


def test_a_lock_is_for_one_at_a_time_and_leaves_no_file(tmp_path: Path) -> None:
    path, inside, most, printed = tmp_path / "a/x.lock", [], [], []
    together = threading.Barrier(4)

    def work(number: int) -> None:
        together.wait()
        for _ in range(5):
            with locked(path, printed.append):
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.002)
                inside.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 20 and set(most) == {1} and not path.exists()
    assert set(printed) == {f"another process is working in {tmp_path / 'a'}: waiting for it to finish"}


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        printed: list[str] = []
        with locked(path, lambda text: (printed.append(text), holder.send_signal(signal.SIGKILL))):
            assert len(printed) == 1
    assert not path.exists()


def test_a_hash_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(cache, "REMEMBERED_BYTES", 3)
    one, two = (hashlib.sha256(text).hexdigest() for text in (b"one", b"two"))
    path, real = tmp_path / "a.bin", time.time_ns
    path.write_bytes(b"one")
    os.utime(path, (1, 1))
    assert content_hash(path) == one
    assert not list(cache_folder("hashes").glob("*.json"))  # it has only just been written
    monkeypatch.setattr(cache.time, "time_ns", lambda: real() + 10**10)
    assert content_hash(path) == one
    (note,) = cache_folder("hashes").glob("*.json")
    note.write_text(note.read_text().replace(one, "remembered"))
    assert content_hash(path) == "remembered"
    path.write_bytes(b"two")
    os.utime(path, (1, 1))  # the same times as before: the change of the inode tells
    assert content_hash(path) == two
    note.write_text("not JSON")
    assert content_hash(path) == two
    # A cache that cannot be written costs only time.
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(path))
    assert content_hash(path) == two
    with pytest.raises(DataError, match=r"gone: cannot be read"):
        content_hash(tmp_path / "gone")
