"""The lock that a run holds on everything that it writes, from its start to its end.

Two runs of one name would rotate each other's log and delete each other's checkpoints. So each output (log file,
checkpoint folder, model folder) has a lock file, and beside it a JSON file that says who holds it. The lock is one of
the operating system, which ends with its process however that ends: a JSON file without a held lock was left by a
killed process, and is replaced. Forked children do not inherit the lock (filelock closes it in them).

Some network file systems have no locks. There a file with the id of its process is the lock (filelock's SoftFileLock),
which is stale if it is of this host and its process is gone. Of a process on another host that cannot be known.
"""

from __future__ import annotations

import errno
import getpass
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from pydantic import Field, TypeAdapter

from llmq.disk import beside, existing_folder, storage, write_whole
from llmq.errors import StorageError

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
LONGEST_COMMAND = 200  # characters of a command line that are kept


@dataclass(frozen=True)
class RunOutput:
    """Something that a run writes, the option that names it, and its lock file."""

    option: str
    path: Path
    lock: Path

    @property
    def holder(self) -> Path:
        """The JSON file that says who holds the lock."""
        return self.lock.with_name(f"{self.lock.name}.json")


def replaced_whole(option: str, path: Path) -> RunOutput:
    """A file, or a folder that another one takes the place of: its lock is beside it. StorageError for `/`."""
    path = Path(os.path.realpath(path.expanduser()))
    return RunOutput(option, path, beside(path, f".{path.name}.lock"))


def kept_folder(option: str, path: Path) -> RunOutput:
    """A folder that stays, and may be a mount point: its lock is inside it."""
    path = Path(os.path.realpath(path.expanduser()))
    return RunOutput(option, path, path / ".lock")


@dataclass(frozen=True)
class Holder:
    """Who holds a lock, in words; the operating system, or filelock, decides whether it is held."""

    pid: Annotated[int, Field(gt=0, strict=True)]
    host: str
    user: str
    started: str
    command: str

    @classmethod
    def this_process(cls) -> Holder:
        """As of now."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user may have no name
            user = str(os.getuid())
        command = shlex.join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]])
        if len(command) > LONGEST_COMMAND:
            command = f"{command[: LONGEST_COMMAND - 4]} ..."
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return cls(os.getpid(), socket.gethostname(), user, started, command)

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """As written at `path`; None if there is none, or it is not complete."""
        with suppress(OSError, ValueError):
            return _HOLDER.validate_json(path.read_bytes())
        return None

    def json(self) -> bytes:
        """What `read` reads."""
        return _HOLDER.dump_json(self, indent=1)

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on {self.host}, since {self.started}: {self.command}"


_HOLDER = TypeAdapter(Holder)


@contextmanager
def held(output: RunOutput, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of `output`; afterwards no trace of it is left.

    `say` takes a line where a stale lock had to be replaced. StorageError if another process or thread holds it, naming
    that, or if it cannot be written.
    """
    if os.path.exists(output.path) and not (os.path.isfile(output.path) or os.path.isdir(output.path)):
        yield  # a device, such as /dev/null, keeps nothing
        return
    place = output.lock.parent
    missing = [path for path in (place, *place.parents) if not os.path.exists(path)]
    with ExitStack() as cleanup:
        with storage(output.path, advice=f"choose another {output.option}"):
            cleanup.callback(_remove_empty, missing)
            lock: BaseFileLock = FileLock(output.lock, timeout=0, thread_local=False, fallback_to_soft=False)
            try:
                place.mkdir(parents=True, exist_ok=True)
                # Where no file can be made, FileLock takes that for a lock which was just removed.
                os.close(os.open(output.lock, os.O_WRONLY | os.O_CREAT, 0o666))
                lock.acquire()
            except FileNotFoundError:  # what /proc says, where no file can be made
                raise OSError(errno.ENOENT, f"{existing_folder(place)} takes no new files") from None
            except Timeout:
                raise _refusal(output) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                output.lock.unlink(missing_ok=True)
                lock = _without_locks(output, say)
            cleanup.callback(lock.release)
            cleanup.callback(_remove, output.lock)  # still held, so that no other run has just it
            write_whole(output.holder, Holder.this_process().json())
            cleanup.callback(_remove, output.holder)
        yield


def _without_locks(output: RunOutput, say: Callable[[str], None]) -> BaseFileLock:
    """The lock of a file system that has none."""
    marker = output.lock.with_name(f"{output.lock.name}.pid")  # FileLock would empty a file of its own name
    lock = SoftFileLock(marker, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        advice = f"; this file system has no locks: if that run has ended, delete {marker}"
        raise _refusal(output, advice) from None
    if (there := Holder.read(output.holder)) is not None:
        say(f"The lock {marker} is stale, since its process has ended: replacing it ({there})")
    return lock


def _refusal(output: RunOutput, advice: str = "") -> StorageError:
    there = Holder.read(output.holder)
    if there is None:
        who, end = "another process, which has not written its name yet", "end that run"
    else:
        where = "" if there.host == socket.gethostname() else f" on {there.host}"
        who, end = str(there), f"end that run with `kill {there.pid}`{where}"
    return StorageError(
        f"{output.path} is in use by {who}\n"
        f"Two runs would destroy each other's files: choose another --name (or {output.option}), or {end}{advice}"
    )


def _remove(path: Path) -> None:
    with suppress(OSError):  # what is left does no harm: the next run replaces it
        path.unlink()


def _remove_empty(folders: Sequence[Path]) -> None:
    """Removes those of `folders`, the innermost first, that are empty."""
    with suppress(OSError):
        for path in folders:
            path.rmdir()
