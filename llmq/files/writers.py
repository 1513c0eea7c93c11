"""How a checkpoint is written: each rank's tensors into files of its own, then one commit, beside training.

Until the commit nothing has the checkpoint's name: what a killed writer leaves is a hidden folder, which the next save
removes. The commit writes the manifest last, renames the folder, and only then deletes older checkpoints.

`Saver` does so in a thread: a step waits for a copy of its state in host memory alone, which is complete before the
next update runs, so the checkpoint has the bits of its step. One save is under way at a time; the next one waits for
it, as do the end of a run and an interrupt. The memory of the copy is taken at the first save and used again by the
others. Where the host has too little, a save holds the run up, and takes one tensor at a time.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from llmq import disk
from llmq.comm.world import ALONE, World
from llmq.errors import StorageError
from llmq.files.manifest import FOLDER_NAME, Box, CheckpointManifest, Placed, WholeTensor, found, sound, write_manifest
from llmq.files.tensor_files import ByteCount, Moved, Piece, Shard, cut, file_name, files_bytes, places, write_files
from llmq.screen import StartTask, unshown

FILE_BYTES = 1 << 30
PART = "part-{:05d}.json"  # what a rank tells the one that commits
MANIFEST_BYTES = 1 << 20  # allowed for the manifest in estimates; it holds no tensors
POLL_S = 0.1  # between looks at how far a save is
CLOSE_S = 10.0  # for a save that is given up
Into = Callable[[str], np.ndarray]  # where the tensor of a name goes
Copies = Iterable[tuple[str, np.ndarray]]
_not_written = partial(
    disk.storage,
    failed="the checkpoint cannot be written",
    kept="; earlier checkpoints are as they were",
    room="free some space, lower --ckpt-keep-n",
    advice="choose another --checkpoint-dir",
)


@dataclass(frozen=True)
class TensorSlice:
    """What one writer has of a tensor of the run: the indices from `start` on, of this `shape`."""

    tensor: Piece
    start: Box
    shape: Box

    @classmethod
    def whole(cls, tensor: Piece) -> TensorSlice:
        """All of it."""
        return cls(tensor, (0,) * len(tensor.shape), tensor.shape)

    @property
    def piece(self) -> Piece:
        """What its file has: `name`, or `name[0:64,0:128]` where it is not all of the tensor."""
        if self.shape == self.tensor.shape:
            return self.tensor
        ranges = ",".join(f"{at}:{at + count}" for at, count in zip(self.start, self.shape, strict=True))
        return Piece(f"{self.tensor.name}[{ranges}]", self.shape, self.tensor.dtype)


@dataclass(frozen=True)
class Keep:
    """The checkpoints that outlive a newer one: the `newest`, multiples of `major` steps, the `best` by a metric.

    With `newest` 0 all of them do.
    """

    newest: int = 0
    major: int = 0
    best: str | None = None

    def spares(self, step: int) -> bool:
        """Whether the checkpoint of a step stays for its number."""
        return self.major > 0 and step % self.major == 0


@dataclass(frozen=True)
class Snapshot:
    """What is to be saved: `tensors(into)` copies what `slices` say, in this order; the rest goes into the manifest."""

    step: int
    slices: Sequence[TensorSlice]
    tensors: Callable[[Into | None], Copies]
    state: Mapping[str, Any]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Saving:
    """A save under way: what is saved and what it spares, the folder that it will be, and the hidden one until then."""

    snapshot: Snapshot
    keep: Keep
    path: Path
    hidden: Path
    needed: int  # bytes


@dataclass(frozen=True)
class WrittenPart:
    """What a rank has written: its files, and its slices of tensors, as the manifest says them."""

    files: tuple[Shard, ...]
    tensors: dict[str, WholeTensor]


def write_part(saving: Saving, rank: int, tensors: Copies, moved: Moved, *, in_memory: bool = False) -> WrittenPart:
    """Writes `tensors`, which are the slices of the snapshot in order, into files of this rank. StorageError.

    One value is in memory at a time, or all are: then several files are written at once.
    """
    slices = saving.snapshot.slices

    def checked() -> Iterator[np.ndarray]:
        for each, (name, array) in zip(slices, tensors, strict=True):
            wanted = replace(each.tensor, shape=each.shape)
            assert Piece(name, array.shape, array.dtype) == wanted, f"{name} is not {each}"
            yield array

    parts = cut((each.piece for each in slices), FILE_BYTES)
    files = [(f"tensors-{rank:05d}-{n:05d}.safetensors", pieces) for n, pieces in enumerate(parts, 1)]
    with _not_written(saving.path.parent, needed=saving.needed):
        shards = write_files(saving.hidden, files, checked(), moved, in_memory=in_memory)
    at = [(name, place) for name, pieces in files for place in places(pieces)]
    placed = {
        each.tensor.name: WholeTensor(
            file_name(each.tensor.dtype), each.tensor.shape, (Placed(name, place, each.start, each.shape),)
        )
        for each, (name, place) in zip(slices, at, strict=True)
    }
    return WrittenPart(tuple(shards), placed)


def hand_over(saving: Saving, rank: int, part: WrittenPart | str) -> None:
    """Leaves word beside a rank's files that they are complete, or why not, for the rank that commits. StorageError."""
    with _not_written(saving.path.parent):
        target = saving.hidden / PART.format(rank)
        target.with_suffix(".new").write_bytes(_PART.dump_json(part))
        target.with_suffix(".new").replace(target)


def part_of(saving: Saving, rank: int) -> WrittenPart | None:
    """What another rank has written; None if it is not done. StorageError if it has failed."""
    path = saving.hidden / PART.format(rank)
    with _not_written(saving.path.parent):
        if not path.exists():
            return None
        part = _PART.validate_json(path.read_bytes())
        path.unlink()
    if isinstance(part, str):
        raise StorageError(f"rank {rank} has not written its part of {saving.path}: {part}")
    return part


def commit(saving: Saving, parts: Sequence[WrittenPart]) -> Path:
    """Gives the checkpoint its name, with the parts of all ranks in order; then deletes those that nothing spares.

    A checkpoint of this step that is there already is replaced. StorageError leaves the earlier ones as they were.
    """
    folder, snapshot = saving.path.parent, saving.snapshot
    tensors: dict[str, WholeTensor] = {}
    for name, mine in (tensor for part in parts for tensor in part.tensors.items()):
        before = tensors.setdefault(name, replace(mine, slices=()))
        assert (before.dtype, before.shape) == (mine.dtype, mine.shape), f"two ranks disagree about {name}"
        tensors[name] = replace(mine, slices=tuple(sorted((*before.slices, *mine.slices), key=lambda at: at.start)))
    files = tuple(shard for part in parts for shard in part.files)
    with _not_written(folder):
        number = 1 + max((there.save for path in found(folder).values() if (there := sound(path))), default=0)
        state, metrics = dict(snapshot.state), dict(snapshot.metrics)
        write_manifest(saving.hidden, CheckpointManifest(snapshot.step, number, files, tensors, state, metrics))
        disk.replace_folder(saving.path, saving.hidden)
    try:
        _rotate(saving.path, saving.keep)
    except OSError as error:
        raise StorageError(f"{saving.path} is complete, but an older checkpoint cannot be deleted: {error}") from error
    return saving.path


def checkpoint_bytes(pieces: Iterable[Piece]) -> int:
    """Disk that one checkpoint of these tensors takes (an upper bound by < 1 MiB)."""
    return files_bytes(cut(pieces, FILE_BYTES)) + MANIFEST_BYTES


def remove_unfinished(folder: Path) -> None:
    """Deletes what dead writers left, and finishes replacements that were cut off. StorageError."""
    with _not_written(folder):
        for name in {match.group() for path in folder.glob(".step-*") if (match := FOLDER_NAME.search(path.name))}:
            disk.remove_leftovers(folder / name)


def gain(metric: str, value: float, than: float) -> float:
    """By how much a value of a metric is better than another one: lower if its name ends in `loss`, else higher."""
    return than - value if metric.endswith("loss") else value - than


def best_of(manifests: Iterable[CheckpointManifest], metric: str) -> CheckpointManifest | None:
    """The checkpoint with the best value of a metric, the earlier one of two that are alike."""
    known = [manifest for manifest in manifests if metric in manifest.metrics]
    return max(known, key=lambda manifest: (gain(metric, manifest.metrics[metric], 0), -manifest.save), default=None)


def _rotate(newest: Path, keep: Keep) -> None:
    """Deletes what newer checkpoints replace, first those that are damaged at first sight."""
    if not keep.newest:
        return
    manifests = {path: sound(path) for path in found(newest.parent).values() if path != newest}
    numbers = {path: manifest.save if manifest else 0 for path, manifest in manifests.items()}
    others = sorted(numbers, key=lambda path: (numbers[path], path.name))
    known = [manifest for manifest in (*manifests.values(), sound(newest)) if manifest]
    best = best_of(known, keep.best) if keep.best else None
    for path in others[: max(len(others) - keep.newest + 1, 0)]:
        manifest = manifests[path]
        if manifest is None or not (keep.spares(manifest.step) or (best and manifest.step == best.step)):
            disk.remove_folder(path)


class _GivenUp(Exception):
    """The run ends at once, without its save."""


class Saver:
    """Writes checkpoints into `folder`, one at a time; with `allocate`, which gives memory for copies, in a thread."""

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None],
        allocate: Callable[[int], np.ndarray] | None,
        task: StartTask = unshown,
        world: World = ALONE,
    ) -> None:
        self._folder, self._say, self._allocate, self._task, self._world = folder, say, allocate, task, world
        self._memory = np.empty(0, np.uint8)
        self._thread: threading.Thread | None = None
        self._shown, self._count = ExitStack(), ByteCount()
        self._show: Callable[[], None] = lambda: None  # how far the save is
        self._gives_up = False
        self._path: Path | None = None
        self._error: BaseException | None = None

    def save(self, snapshot: Snapshot, keep: Keep) -> None:
        """Begins to save; the last save must be `finished`. Without a thread, it is complete at the end, or raises.

        All ranks save at the same step.
        """
        assert self._thread is None, "one save at a time"
        total = sum(each.piece.num_bytes for each in snapshot.slices)
        memory = self._room(total)
        copies = None if memory is None else list(snapshot.tensors(_places(snapshot.slices, memory)))
        saving = self._begun(snapshot, keep)
        report = self._shown.enter_context(self._task(f"Saving {saving.path}"))
        if copies is None:
            with self._shown:
                self._count = ByteCount(total, report)
                self._path = self._written(saving, snapshot.tensors(None))
            return
        self._count = count = ByteCount(total)
        self._show = lambda: report(count.done, total)  # by the thread of the run
        self._thread = threading.Thread(target=self._write, args=(saving, copies), name="llmq-save", daemon=True)
        self._thread.start()

    def finished(self, *, wait: bool) -> Path | None:
        """The checkpoint that was completed since the last call, if any; raises what made it fail.

        With `wait`, waits for one that is under way. Either way the task that began with it shows how far it is.
        """
        while (thread := self._thread) is not None:
            thread.join(POLL_S if wait else 0.0)
            is_over = not thread.is_alive()
            self._show()  # after that look: the last report is of all bytes, however fast they were written
            if is_over:
                self._thread = None
            elif not wait:
                return None
        self._shown.close()
        (path, self._path), (error, self._error) = (self._path, None), (self._error, None)
        if error is not None:
            raise error
        return path

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """A second Ctrl-C gives up what is under way; any other end waits for it."""
        self._shown.close()
        if self._thread is not None:
            self._gives_up = kind is not None and not issubclass(kind, Exception)
            self._thread.join(CLOSE_S if self._gives_up else None)

    def _begun(self, snapshot: Snapshot, keep: Keep) -> Saving:
        """The hidden folder that all ranks write into, which the first one makes if there is room. StorageError.

        This process holds the lock of the folder, or knows that no other writes to it.
        """
        world, folder, path = self._world, self._folder, self._folder / f"step-{snapshot.step:08d}"
        needed = sum(world.gather(checkpoint_bytes(each.piece for each in snapshot.slices)))
        hidden, why = str(disk.temporary_name(path)), ""
        if world.rank == 0:
            try:
                with _not_written(folder, needed=needed):
                    folder.mkdir(parents=True, exist_ok=True)
                    remove_unfinished(folder)
                    disk.check_free_space({"the checkpoint": (folder, needed)})
                    os.mkdir(hidden)
            except StorageError as error:
                why = str(error)
        hidden, why = world.gather((hidden, why))[0]
        if why:
            raise StorageError(why)
        seen = world.gather(os.path.isdir(hidden))  # by all, before the first rank can give up and remove it
        if False in seen:
            raise StorageError(
                f"rank {seen.index(False)} does not see {hidden}, which rank 0 has made: give a --checkpoint-dir on a "
                "file system that all machines share"
            )
        return Saving(snapshot, keep, path, Path(hidden), needed)

    def _write(self, saving: Saving, copies: Copies) -> None:
        try:
            self._path = self._written(saving, copies, in_memory=True)
        except BaseException as error:  # raised by `finished`, in the thread of the run
            self._error = error

    def _written(self, saving: Saving, tensors: Copies, *, in_memory: bool = False) -> Path:
        """Writes this rank's part. The first rank then waits for the others' and commits, and they for that."""
        rank, size = self._world.rank, self._world.size
        own = partial(write_part, saving, rank, tensors, self._moved, in_memory=in_memory)
        if rank:
            try:
                hand_over(saving, rank, own())
            except BaseException as error:
                if saving.hidden.is_dir() or not isinstance(error, StorageError):
                    with suppress(StorageError):
                        hand_over(saving, rank, str(error))
                    raise  # else rank 0 has given up, and says why
            while saving.hidden.is_dir():
                self._wait()
            if not saving.path.is_dir():
                raise StorageError(f"{saving.path} was not completed, as rank 0 says")
            return saving.path
        try:
            parts = [own()]
            while len(parts) < size:
                if (other := part_of(saving, len(parts))) is None:
                    self._wait()
                else:
                    parts.append(other)
            return commit(saving, parts)
        except BaseException:
            with suppress(OSError):  # renamed first: others may be writing into it, and wait for it to go
                shutil.rmtree(saving.hidden.rename(disk.temporary_name(saving.path)))
            raise

    def _wait(self) -> None:
        time.sleep(POLL_S)
        self._moved(0)

    def _moved(self, num_bytes: int) -> None:
        self._count.moved(num_bytes)
        if self._gives_up:
            raise _GivenUp

    def _room(self, num_bytes: int) -> np.ndarray | None:
        """Memory for a copy, or None where there is too little of it."""
        if self._memory.size < num_bytes and self._allocate is not None:
            self._memory = np.empty(0, np.uint8)  # before the larger one is taken
            try:
                self._memory = self._allocate(num_bytes)
            except MemoryError:
                self._allocate = None
                self._say(f"Checkpoints are saved while training waits: {num_bytes:,} bytes of host memory are refused")
        return None if self._allocate is None else self._memory


def _places(slices: Sequence[TensorSlice], memory: np.ndarray) -> Into:
    """The places of tensors in a memory, one after the other; the largest items first, so that all are aligned."""
    places, offset = {}, 0
    for each in sorted(slices, key=lambda each: -each.tensor.dtype.itemsize):
        piece = each.piece
        places[each.tensor.name] = memory[offset : offset + piece.num_bytes].view(piece.dtype).reshape(piece.shape)
        offset += piece.num_bytes
    return places.__getitem__


_PART: TypeAdapter[WrittenPart | str] = TypeAdapter(WrittenPart | str)
