"""Saving beside training: a step waits for a copy of its state in host memory, and a thread writes that to the disk.

The copy is complete before the next update runs, so the checkpoint has the bits of its step. One save is under way at a
time; the next one waits for it, as do the end of a run and an interrupt. The memory of the copy is taken at the first
save and used again by the others. Where the host has too little, a save holds the run up, and takes one tensor at a
time.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from llmq.comm.world import ALONE, World
from llmq.disk import discarded_on_error, temporary_name
from llmq.errors import StorageError
from llmq.files import writers
from llmq.files.manifest import folder_name
from llmq.files.tensor_files import ByteCount, Piece
from llmq.files.writers import Keep, Saving, TensorSlice
from llmq.screen import StartTask, unshown

POLL_S = 0.1  # between looks at how far a save is
CLOSE_S = 10.0  # for a save that is given up

Into = Callable[[str], np.ndarray]  # where the tensor of a name goes
Copies = Iterable[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Snapshot:
    """What is to be saved: `tensors(into)` copies what `slices` say, in this order; the rest goes into the manifest."""

    step: int
    slices: Sequence[TensorSlice]
    tensors: Callable[[Into | None], Copies]
    state: Mapping[str, Any]
    metrics: Mapping[str, float]

    @property
    def pieces(self) -> list[Piece]:
        """What this rank writes."""
        return [each.piece for each in self.slices]


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
        self._folder, self._say, self._allocate, self._task = folder, say, allocate, task
        self._world = world
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
        total = sum(piece.num_bytes for piece in snapshot.pieces)
        memory = self._room(total)
        saving = self._begun(snapshot)
        report = self._shown.enter_context(self._task(f"Saving {saving.path}"))
        if memory is None:
            with self._shown:
                self._count = ByteCount(total, report)
                self._path = self._written(saving, snapshot, snapshot.tensors(None), keep)
            return
        self._count = count = ByteCount(total)
        self._show = lambda: report(count.done, total)  # by the thread of the run
        with discarded_on_error(saving.hidden):
            copies = list(snapshot.tensors(_places(snapshot.slices, memory)))
        self._thread = threading.Thread(
            target=self._write, args=(saving, snapshot, copies, keep), name="llmq-save", daemon=True
        )
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A second Ctrl-C gives up what is under way; any other end waits for it."""
        self._shown.close()
        if self._thread is not None:
            self._gives_up = kind is not None and not issubclass(kind, Exception)
            self._thread.join(CLOSE_S if self._gives_up else None)

    def _begun(self, snapshot: Snapshot) -> Saving:
        """The hidden folder that all ranks write into, which the first one makes."""
        world, hidden, why = self._world, None, ""
        needed = sum(world.gather(writers.checkpoint_bytes(snapshot.pieces)))
        if world.rank == 0:
            try:
                hidden = str(writers.begin(self._folder, snapshot.step, world.size, needed=needed).hidden)
            except StorageError as error:
                why = str(error)
        hidden, why = world.gather((hidden, why))[0]
        if hidden is None:
            raise StorageError(why)
        seen = world.gather(Path(hidden).is_dir())  # by all, before the first rank can give up and remove it
        if False in seen:
            raise StorageError(
                f"rank {seen.index(False)} does not see {hidden}, which rank 0 has made: give a --checkpoint-dir on a "
                "file system that all machines share"
            )
        return Saving(self._folder / folder_name(snapshot.step), Path(hidden), snapshot.step, world.size, needed)

    def _write(self, saving: Saving, snapshot: Snapshot, copies: Copies, keep: Keep) -> None:
        try:
            self._path = self._written(saving, snapshot, copies, keep, in_memory=True)
        except BaseException as error:  # raised by `finished`, in the thread of the run
            self._error = error

    def _written(
        self, saving: Saving, snapshot: Snapshot, tensors: Copies, keep: Keep, *, in_memory: bool = False
    ) -> Path:
        """Writes this rank's part. The first rank then waits for the others' and commits, and they for that."""
        rank = self._world.rank
        own = partial(
            writers.write_part, saving, rank, snapshot.slices, tensors, in_memory=in_memory, moved=self._moved
        )
        if rank:
            try:
                writers.hand_over(saving, rank, own())
            except BaseException as error:
                if saving.hidden.is_dir() or not isinstance(error, StorageError):
                    with suppress(StorageError):
                        writers.hand_over(saving, rank, str(error))
                    raise  # else rank 0 has given up, and says why
            while saving.hidden.is_dir():
                self._wait()
            if not saving.path.is_dir():
                raise StorageError(f"{saving.path} was not completed, as rank 0 says")
            return saving.path
        try:
            parts = [own()]
            while len(parts) < saving.world:
                if (other := writers.part_of(saving, len(parts))) is None:
                    self._wait()
                else:
                    parts.append(other)
            return writers.commit(saving, parts, snapshot.state, metrics=snapshot.metrics, keep=keep)
        except BaseException:
            with suppress(OSError):  # renamed first: others may be writing into it, and wait for it to go
                shutil.rmtree(saving.hidden.rename(temporary_name(saving.path)))
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
