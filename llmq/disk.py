"""Room on the disk, checked before it is needed; files and folders that appear whole; what a disk refuses; the cache.

What appears whole is written beside its place under a temporary name, made durable, and renamed. A folder that is
replaced steps aside first, for no rename replaces one that is not empty: `finish_folder` completes what a kill cut off.
"""

import errno
import glob
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from llmq.errors import DataError, StorageError

MIB, GIB = 2**20, 2**30
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def shown(num_bytes: int) -> str:
    """`12.3 GiB`, `45.6 MiB` or `789 bytes`."""
    sizes = ((GIB, "GiB"), (MIB, "MiB"))
    return next(
        (f"{num_bytes / size:,.1f} {unit}" for size, unit in sizes if num_bytes >= size), f"{num_bytes:,} bytes"
    )


def size_bytes(text: str) -> int | None:
    """Bytes of a size such as `16GiB`, `1.5 GiB` or `800MiB`; None for what is no size above 0."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?(GiB|MiB)", text.strip(), re.IGNORECASE)
    return int(float(found[1]) * (GIB if found[2].lower() == "gib" else MIB)) or None if found else None


def existing_folder(folder: Path) -> Path:
    """The nearest folder upwards that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))


def free_bytes(folder: Path) -> int:
    """Bytes free on the disk that holds `folder`, or would."""
    return shutil.disk_usage(existing_folder(folder)).free


def takes_files(folder: Path) -> bool:
    """Whether this user can make files in a folder; rights alone do not tell: root has all of them in /proc."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:
        return error.errno in FULL


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_free_space(needs: Mapping[str, tuple[Path, int]]) -> None:
    """Checks that what is to be written fits: {"2 checkpoints": (folder, bytes), "the export": (folder, bytes)}.

    Needs on one file system are added up. Folders need not exist. StorageError names all that cannot be written.
    """
    problems: list[str] = []
    disks: dict[int, tuple[Path, list[str], list[int]]] = {}
    for what, (folder, num_bytes) in needs.items():
        there = existing_folder(folder)
        if not takes_files(there):
            problems.append(
                f"{what} cannot be written to {folder}: {there} is not a folder that this user can write to"
            )
            continue
        disk = disks.setdefault(os.stat(there).st_dev, (there, [], []))
        disk[1].append(f"{what} in {folder}: {shown(num_bytes)} needed")
        disk[2].append(num_bytes)
    for there, texts, sizes in disks.values():
        free = free_bytes(there)
        if sum(sizes) > free:
            problems.append(
                f"{' and '.join(texts)}, {shown(free)} are free, {shown(sum(sizes) - free)} are missing: free space "
                "there, choose folders on another disk, or keep fewer checkpoints with --ckpt-keep-n"
            )
    if problems:
        raise StorageError("\n".join(problems))


def write_whole(path: Path, content: bytes) -> None:
    """As replace_file; StorageError if the disk does not take it."""
    with storage(path):
        replace_file(path, content)


def replace_file(path: Path, content: bytes) -> None:
    """Puts a small file in place at once, and durably: a reader sees the old content or all of the new. OSError."""
    temporary = temporary_name(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with new_file(temporary) as file:
            write_all(file, content)
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A descriptor of a new file to write to with `write_all`; at the end its content is durable. OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of `data`, of which a disk may take a part at a time. OSError."""
    view = memoryview(data)
    while view:
        written = os.write(descriptor, view)
        if not written:
            raise OSError(errno.EIO, "the disk takes no more bytes")
        view = view[written:]


@contextmanager
def whole_folder(path: Path, kept: Callable[[str], bool] | None = None) -> Iterator[Path]:
    """A new folder to write into, which then takes the name `path`, as replace_folder; on an error it goes. OSError."""
    fresh = temporary_name(path)
    try:
        fresh.mkdir(parents=True)
        yield fresh
        replace_folder(path, fresh, kept)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def replace_folder(path: Path, fresh: Path, kept: Callable[[str], bool] | None = None) -> None:
    """Gives the folder `fresh` the name `path`, with all that is in it durable; one that is there makes way. OSError.

    Entries of the old folder whose names are to be `kept` move on to the new one.
    """
    for inner, _, names in os.walk(fresh, topdown=False):
        for name in names:
            with open(os.path.join(inner, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(inner))
    finish_folder(path, kept)
    old = replaced_name(path)
    try:
        if path.exists():
            os.rename(path, old)
        os.rename(fresh, path)
    finally:
        if old.exists() and not path.exists():
            os.rename(old, path)
    finish_folder(path, kept)
    for folder in (path.parent, path.parent.parent):
        sync_folder(folder)


def finish_folder(path: Path, kept: Callable[[str], bool] | None = None) -> None:
    """Completes a replacement of `path` that was cut off: the old folder comes back, or makes way to the new one."""
    old = replaced_name(path)
    if not old.is_dir():
        return
    if not path.exists():
        os.rename(old, path)
        return
    for entry in [entry for entry in old.iterdir() if kept and kept(entry.name)]:
        if (path / entry.name).exists():
            raise StorageError(f"{entry} is left of a folder that was replaced, and {path} has one too: move one away")
        os.rename(entry, path / entry.name)
    shutil.rmtree(old, ignore_errors=True)


def replaced_name(path: Path) -> Path:
    """Where the folder `path` is while another one takes its place."""
    return beside(path, f".{path.name}.replaced")


def remove_folder(path: Path) -> None:
    """Deletes a folder; half of one never has its name. OSError."""
    hidden = temporary_name(path)
    os.rename(path, hidden)
    shutil.rmtree(hidden)


def temporary_name(path: Path) -> Path:
    """Where `path` is written before it is complete: hidden, beside it, and another name at each call.

    Process ids would not do: those of containers that share a folder can be the same.
    """
    return beside(path, f".{path.name}.{secrets.token_hex(8)}.tmp")


def beside(path: Path, name: str) -> Path:
    """The place of this name in the folder that `path` is in. StorageError for `/`, which is in none."""
    if not path.name:
        raise StorageError(f"{path} is the root of the file system: give a folder inside it")
    return path.with_name(name)


def remove_leftovers(path: Path, kept: Callable[[str], bool] | None = None) -> None:
    """Finishes what killed writers of `path` began, and removes what they left; no process may be writing it."""
    with storage(path):
        finish_folder(path, kept)
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


@contextmanager
def storage(
    path: Path,
    failed: str = "cannot be written",
    *,
    kept: str = "",
    room: str = "free some space",
    advice: str = "choose another folder",
    needed: int | None = None,
) -> Iterator[None]:
    """Turns errors of the operating system while writing `path` into "PATH: FAILED (reason)KEPT: ADVICE".

    If the disk is full, the reason has the bytes that are `needed`, where that is known, and those free, and the advice
    begins with how to make `room`.
    """
    try:
        yield
    except OSError as error:
        reason = _reason(error)
        if error.errno in FULL:
            needs = f"it needs {needed:,} bytes, " if needed is not None else ""
            reason += f": {needs}{free_bytes(path):,} bytes are free"
            advice = f"{room}, or {advice}"
        raise StorageError(f"{path}: {failed} ({reason}){kept}: {advice}") from error


def _reason(error: OSError) -> str:
    """Why something cannot be written. Where a file is in the way, Linux's message does not name it."""
    there = existing_folder(Path(os.fsdecode(error.filename or ".")))
    if error.errno in (errno.EEXIST, errno.ENOTDIR) and not there.is_dir():
        return f"{there} is not a folder"
    return str(error.strerror or error)


@contextmanager
def reading(path: Path, advice: str = "") -> Iterator[None]:
    """Turns errors of the operating system while reading `path` into DataError "PATH: cannot be read (why): ADVICE"."""
    try:
        yield
    except OSError as error:
        way_out = f": {advice}" if advice else ""
        raise DataError(f"{path}: cannot be read ({error.strerror or error}){way_out}") from error


def small_text(path: Path, most_bytes: int, option: str, advice: str) -> str:
    """The text of a file that an option names. DataError for what is not UTF-8, larger, or cannot be read."""
    with reading(path, advice):
        size = path.stat().st_size
        content = path.read_bytes() if size <= most_bytes else b""
    if size > most_bytes:
        raise DataError(f"{option} {path} has {size:,} bytes, and {most_bytes:,} can be read: {advice}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{option} {path} is not text in UTF-8 (byte {error.start}): {advice}") from None


def cache_folder(kind: str) -> Path:
    """Folder for one kind of thing that is worth keeping between runs (`kernels`, `gemm`, `tokens`); it may not exist.

    The place is `$LLMQ_CACHE_DIR`, else `$XDG_CACHE_HOME/llmq`, else `~/.cache/llmq`, else, for a user without a home,
    a new temporary folder. Everything in it may be deleted at any time.
    """
    if own := os.environ.get("LLMQ_CACHE_DIR"):
        return Path(own).expanduser() / kind
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "llmq" / kind
    try:
        home = Path.home()
    except RuntimeError:  # neither $HOME nor an entry in the password file
        home = Path(os.devnull)
    return (home / ".cache" / "llmq" if home.is_dir() else _of_this_process()) / kind


@cache
def _of_this_process() -> Path:
    return Path(tempfile.mkdtemp(prefix="llmq-"))
