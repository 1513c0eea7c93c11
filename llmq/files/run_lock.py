"""The lock that a run holds on everything that it writes, from its start to its end.

Two runs of one name would rotate each other's log and delete each other's checkpoints. So each output (log file,
checkpoint folder, model folder) has a lock file, and beside it a text on who holds it. The lock is one of the operating
system, which ends with its process however that ends: a text without a held lock was left by a killed process, and is
replaced. Forked children do not inherit the lock (filelock closes it in them).

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

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from llmq.disk import beside, existing_folder, storage, write_whole
from llmq.errors import StorageError
from llmq.redact import redacted

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
        """The file that says who holds the lock."""
        return self.lock.with_name(f"{self.lock.name}.txt")


def replaced_whole(option: str, path: Path) -> RunOutput:
    """A file, or a folder that another one takes the place of: its lock is beside it. StorageError for `/`."""
    path = Path(os.path.realpath(path.expanduser()))
    return RunOutput(option, path, beside(path, f".{path.name}.lock"))


def kept_folder(option: str, path: Path) -> RunOutput:
    """A folder that stays, and may be a mount point: its lock is inside it."""
    path = Path(os.path.realpath(path.expanduser()))
    return RunOutput(option, path, path / ".lock")


def this_process() -> str:
    """What is written of a holder that is this process, as of now: a line on how to end it, and who it is."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    command = redacted(shlex.join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]]))
    if len(command) > LONGEST_COMMAND:
        command = f"{command[: LONGEST_COMMAND - 4]} ..."
    pid, host, since = os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"end that run with `kill {pid}` on {host}\nprocess {pid} of {user} on {host}, since {since}: {command}"


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
            write_whole(output.holder, this_process().encode("utf-8", "replace"))
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
    if who := _holder(output)[0]:
        say(f"The lock {marker} is stale, since its process has ended: replacing it ({who})")
    return lock


def _refusal(output: RunOutput, advice: str = "") -> StorageError:
    who, end = _holder(output)
    return StorageError(
        f"{output.path} is in use by {who or 'another process, which has not written its name yet'}\n"
        f"Two runs would destroy each other's files: choose another --name (or {output.option}), or "
        f"{end or 'end that run'}{advice}"
    )


def _holder(output: RunOutput) -> tuple[str, str]:
    """Who holds a lock and how to end that, in words; both empty if it is not written."""
    with suppress(OSError):
        end, _, who = output.holder.read_text("utf-8", "replace").partition("\n")
        return who, end
    return "", ""


def _remove(path: Path) -> None:
    with suppress(OSError):  # what is left does no harm: the next run replaces it
        path.unlink()


def _remove_empty(folders: Sequence[Path]) -> None:
    """Removes those of `folders`, the innermost first, that are empty."""
    with suppress(OSError):
        for path in folders:
            path.rmdir()
