"""Checkpoints: all that a run needs to continue with the same bits, complete or not there at all.

A checkpoint is a folder `step-00000012` (the number of finished updates) in the checkpoint folder: tensors in
safetensors files (llmq/files/tensor_files.py), and state.json with everything else, the size and checksum of each file,
and a checksum of itself. It appears whole (llmq/disk.py), and older ones are deleted after that. One run writes to a
checkpoint folder at a time: it holds the lock of run_lock.py, so a temporary folder that it finds was left by a process
that is gone, and is removed. Reading (`find`, `load`) takes no lock and changes nothing.

The newest checkpoint is the one written last, not the one of the highest step: after `--continue 8`, step 10 is newer
than an abandoned step 12. Therefore state.json counts the saves.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import llmq
from llmq.disk import check_free_space, reading, remove_folder, remove_leftovers, storage, whole_folder
from llmq.errors import DataError, StorageError, UsageError
from llmq.files.tensor_files import Piece, Shard, Stored, cut, files_bytes, read_tensor, verify, write_files

if TYPE_CHECKING:
    from llmq.options.run import CheckpointOptions

SCHEMA = 1
STATE = "state.json"
NEWEST, AUTO = "newest", "auto"
STATE_BYTES = 1 << 20  # allowed for state.json in estimates; it holds no tensors
SHARD_BYTES = 4 << 30
NAME = re.compile(r"step-([0-9]{8,18})")
MOST_NAMED = 10  # differences from a checkpoint
_not_written = partial(
    storage,
    failed="the checkpoint cannot be written",
    kept="; earlier checkpoints are as they were",
    advice="free space, lower --ckpt-keep-n, or choose another --checkpoint-dir",
)


class Checkpoints:
    """The checkpoints of one run, as its options ask."""

    def __init__(self, options: CheckpointOptions) -> None:
        self.folder = Path(options.checkpoint_dir)
        self.keep = options.ckpt_keep_n
        self._interval = options.ckpt_interval
        self._continue = options.continue_

    @property
    def starts_anew(self) -> bool:
        """Whether --continue auto finds nothing to resume from."""
        return self._continue == AUTO and not _found(self.folder)

    def due(self, step: int, *, last: bool = False) -> bool:
        """Whether to save after the update `step` (from 1): each n-th one, and the last of the run."""
        return last or (self._interval > 0 and step % self._interval == 0)

    def start(self, *, writes: bool = True) -> Path | None:
        """The checkpoint to continue from; None for a run from step 0.

        A run that `writes` holds the folder's lock, and first removes what killed writers left. UsageError if a fresh
        run would mix its checkpoints with those of an earlier one.
        """
        if writes and self.folder.is_dir():
            with _not_written(self.folder):
                _remove_leftovers(self.folder)
        if self._continue is not None:
            return find(self.folder, self._continue)
        if there := _found(self.folder):
            raise UsageError(
                f"{self.folder} holds checkpoints of an earlier run ({_listed(there)}): resume from them with "
                "--continue, choose another --name or --checkpoint-dir, or delete them"
            )
        return None

    def others(self, step: int) -> str:
        """The checkpoints beside that of `step`, in words; empty if there are none."""
        there = {number: path for number, path in _found(self.folder).items() if number != step}
        return _listed(there) if there else ""

    def peak_bytes(self, one: int, first: int, last: int) -> int:
        """Most bytes that the checkpoints of the steps first to last take at a time beyond what is there, `one` each.

        One more than is kept, because older ones go only after the new one is complete; with --ckpt-keep-n 0, which
        keeps all, only the first one is counted.
        """
        due = 1 + ((last - 1) // self._interval - (first - 1) // self._interval if self._interval else 0)
        return one * max(1, min(due, self.keep + 1 - len(_found(self.folder)))) if self.keep else one


def folder_name(step: int) -> str:
    """`step-00000012`."""
    return f"step-{step:08d}"


def save(
    folder: Path,
    step: int,
    pieces: Sequence[Piece],
    tensors: Iterable[tuple[str, np.ndarray]],
    state: Mapping[str, Any],
    *,
    keep: int = 0,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes the checkpoint of `step`, then deletes all but the `keep` newest (0 keeps all); returns its folder.

    `tensors` are what `pieces` say, in this order, and one of them is in memory at a time. `state` is JSON without
    non-finite numbers. The free space is checked before anything is written. A checkpoint of this step that is there
    already is replaced. The caller holds the lock of `folder`, or knows that no other process writes to it.
    StorageError leaves the earlier checkpoints as they were.
    """
    folder = Path(folder)
    path, needed = folder / folder_name(step), checkpoint_bytes(pieces, shard_bytes=shard_bytes)
    with _not_written(folder, needed=needed):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        check_free_space({"the checkpoint": (folder, needed)})
        number = 1 + max((_save_number(path) or 0 for path in _found(folder).values()), default=0)
        with whole_folder(path) as fresh:
            files = ((f"tensors-{n:05d}.safetensors", part) for n, part in enumerate(cut(pieces, shard_bytes), 1))
            shards = write_files(fresh, files, _values(pieces, tensors))
            _write_state(fresh, step, number, shards, state)
        try:
            _delete_old(folder, path, keep)
        except OSError as error:
            raise StorageError(f"{path} is complete, but an older checkpoint cannot be deleted: {error}") from error
    return path


def _values(pieces: Sequence[Piece], tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[np.ndarray]:
    for piece, (name, array) in zip(pieces, tensors, strict=True):
        assert Piece(name, array.shape, array.dtype) == piece, f"{name} {array.shape} is not {piece}"
        yield array


def find(folder: Path, which: str | int | Path) -> Path | None:
    """The checkpoint to continue from: "newest" or "auto", of which auto is None if there are none; a step; or a path.

    DataError if it is not there or damaged at first sight, naming what is there. A damaged newest one is an error
    too: an older one is used only on request.
    """
    folder = Path(folder)
    there = _found(folder)
    if which in (NEWEST, AUTO):
        if not there and which == AUTO:
            return None
        if not there:
            raise DataError(_none_there(folder))
        numbers = {step: _save_number(path) for step, path in there.items()}
        newest = max(there, key=lambda step: numbers[step] or 0)
        step = max([newest, *(step for step, number in numbers.items() if number is None)])
    elif re.fullmatch(r"[0-9]{1,18}", str(which)):
        step = int(str(which))
        if step not in there:
            raise DataError(f"there is no checkpoint of step {step} in {folder}: {_listed(there)}")
    else:
        path = Path(str(which))
        if not (path / STATE).exists() and _found(path):
            return find(path, NEWEST)
        if not path.is_dir():
            raise DataError(f"there is no checkpoint at {path}; in {folder}: {_listed(there)}")
        with _naming_others(path):
            _read_state(path)
        return path
    with _naming_others(there[step]):
        _read_state(there[step])
    return there[step]


def load(path: Path) -> tuple[dict[str, Any], Reader]:
    """Verifies every file of a checkpoint; returns the state as saved, with `step`, and a function that reads a tensor.

    DataError if anything is missing, damaged or of a newer schema, naming the other checkpoints there.
    """
    path = Path(path)
    with _naming_others(path):
        record = _read_state(path)
        tensors: dict[str, Stored] = {}
        for shard in _shards(record):
            tensors |= verify(path, shard)
    return {**record["state"], "step": record["step"]}, Reader(path, tensors)


def load_state(path: Path) -> dict[str, Any]:
    """The state of a checkpoint as saved, with `step`, without a look at its tensors. DataError as of `load`."""
    with _naming_others(Path(path)):
        record = _read_state(Path(path))
    return {**record["state"], "step": record["step"]}


@dataclass(frozen=True)
class Reader:
    """Reads tensors of one verified checkpoint by name, each into memory of its own."""

    path: Path
    tensors: Mapping[str, Stored]

    def __call__(self, name: str) -> np.ndarray:
        if name not in self.tensors:
            raise DataError(f"the checkpoint {self.path} has no tensor {name}: it was saved by another model or setup")
        return read_tensor(self.tensors[name])


def checkpoint_bytes(pieces: Iterable[Piece], *, shard_bytes: int = SHARD_BYTES) -> int:
    """Disk that one checkpoint of these tensors takes (an upper bound by < 1 MiB)."""
    return files_bytes(cut(pieces, shard_bytes)) + STATE_BYTES


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """UsageError naming every option that must match its checkpoint and does not."""
    different = list(_differences(saved, now))
    if different:
        more = [f"  and {len(different) - MOST_NAMED} more"] if len(different) > MOST_NAMED else []
        raise UsageError(
            "the checkpoint was written with other options, and continuing with these would not be the same run:\n"
            + "\n".join([*different[:MOST_NAMED], *more])
        )


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """A line for each value that differs, down into mappings."""
    unset = "not set"
    for name in dict.fromkeys((*now, *saved)):
        old, new = saved.get(name, unset), now.get(name, unset)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{within}{name} ")
        elif _canonical(old) != _canonical(new):
            yield f"  {within}{name}: {old} in the checkpoint, {new} now"


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _remove_leftovers(folder: Path) -> None:
    """Deletes what dead writers left, and finishes replacements that were cut off."""
    left = {match.group() for path in folder.glob(".step-*") if (match := NAME.search(path.name))}
    for name in left:
        remove_leftovers(folder / name)


def _delete_old(folder: Path, newest: Path, keep: int) -> None:
    others = [path for path in _found(folder).values() if path != newest]
    others.sort(key=lambda path: (_save_number(path) or 0, path.name))
    for path in others[: len(others) - keep + 1 if keep > 0 else 0]:
        remove_folder(path)


def _none_there(folder: Path) -> str:
    """That there is no checkpoint in `folder`, and which runs might be meant: that of the nearest name, the newest."""
    whole = folder.absolute()
    places = (
        (whole, "checkpoints"),
        (whole, "*/checkpoints"),
        (whole.parent, "*"),
        (whole.parent.parent, f"*/{glob.escape(whole.name)}"),
    )
    runs = {
        path: max(map(_saved_at, saved))
        for above, name in places
        for path in above.glob(name)
        if (saved := _found(path).values())
    }
    text = f"there is no checkpoint in {folder} to continue from"
    if runs:
        nearest = max(runs, key=lambda path: SequenceMatcher(None, str(path), str(whole)).ratio())
        meant = {nearest: "nearest"}
        meant.setdefault(max(runs, key=lambda path: runs[path]), "newest")
        text += "".join(f"\n  the {which} run has some: {_way_to(path, folder)}" for path, which in meant.items())
    return f"{text}\nWith --continue auto, a run starts from step 0 where there is none"


def _way_to(path: Path, folder: Path) -> str:
    """The checkpoints in `path`, and the option that makes it the checkpoint folder in place of `folder`."""
    shown = path if folder.is_absolute() else Path(os.path.relpath(path))
    default = shown.parts[0] == "runs" and len(shown.parts) == 3 and shown.name == folder.name == "checkpoints"
    option = f"--name {shlex.quote(path.parent.name)}" if default else f"--checkpoint-dir {shlex.quote(str(shown))}"
    return f"{option} ({_listed(_found(path))})"


def _saved_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # its run has just deleted it
        return 0.0


def _found(folder: Path) -> dict[int, Path]:
    """Checkpoints in a folder by step, complete by their names."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return {}
    return {int(match[1]): path for path in paths if (match := NAME.fullmatch(path.name)) and path.is_dir()}


def _listed(there: Mapping[int, Path]) -> str:
    if not there:
        return "no checkpoints"
    return f"step{'' if len(there) == 1 else 's'} " + ", ".join(map(str, sorted(there)))


@contextmanager
def _naming_others(path: Path) -> Iterator[None]:
    """Adds to a DataError about one checkpoint which others could be used."""
    try:
        yield
    except DataError as error:
        there = {s: p for s, p in _found(path.absolute().parent).items() if p != path.absolute()}
        others = {p: number for s, p in there.items() if (number := _save_number(p))}
        advice = f"Others there: {_listed({s: p for s, p in there.items() if p in others})}"
        if others:
            advice += f"; continue from the newest with --continue {max(others, key=lambda p: others[p])}"
        raise DataError(f"{error}. {advice}.") from error


def _save_number(path: Path) -> int | None:
    """Which save of its folder a checkpoint is, or None if it is damaged at first sight."""
    try:
        return int(_read_state(path)["save"])
    except DataError:
        return None


def _write_state(folder: Path, step: int, number: int, shards: Iterable[Shard], state: Mapping[str, Any]) -> None:
    files = [asdict(shard) for shard in shards]
    record = {"schema": SCHEMA, "version": llmq.__version__, "step": step, "save": number, "files": files}
    record["state"] = dict(state)
    record["crc32"] = zlib.crc32(_canonical(record))
    (folder / STATE).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="ascii")


def _read_state(path: Path) -> dict[str, Any]:
    """state.json, checked against its checksum, with every file there in its size; DataError says what is wrong."""
    file = path / STATE
    try:
        record = json.loads(file.read_bytes())
        crc = record.pop("crc32")
        if crc != zlib.crc32(_canonical(record)):
            raise ValueError("its checksum is not the one it was written with")
        if record["schema"] != SCHEMA:
            raise DataError(f"{file} has schema {record['schema']}, this llmq reads {SCHEMA}: update llmq")
        if any(type(record[k]) is not int or record[k] < 0 for k in ("step", "save")):
            raise ValueError("step and save are not counts")
        record["state"].keys()
        shards = _shards(record)
    except OSError as error:
        raise DataError(f"the checkpoint {path} cannot be read: {error.strerror or error}: {file}") from error
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} is corrupt: {error}") from error
    for shard in shards:
        with reading(path / shard.name):
            size = os.stat(path / shard.name).st_size
        if size != shard.num_bytes:
            raise DataError(f"{path / shard.name} has {size} bytes instead of {shard.num_bytes}")
    return record


def _shards(record: Mapping[str, Any]) -> list[Shard]:
    return [Shard(**file) for file in record["files"]]
