"""The CPU: NumPy ops, an array per storage, calls made one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from llmq.backends import BackendMemory, Launch, Needs, Op, Run, between, groups
from llmq.comm.world import ALONE, World
from llmq.disk import shown
from llmq.errors import RefusedMemoryError
from llmq.hardware.cores import use_blas_threads
from llmq.hardware.host_memory import host_memory_bytes, peak_resident_bytes
from llmq.model.held import HostRoom, Room, Values
from llmq.ops import reference
from llmq.ops.temporaries import temporary_bytes
from llmq.screen import Report, unreported
from llmq.tensor import Ref, stored_bytes, stored_dtype, stored_shape

if TYPE_CHECKING:
    from llmq.ops.record import Call

BLAS_THREADS = "blas_threads"  # among the algorithms of a run on the CPU
# What is freed of arrays below 32 MiB, malloc keeps beside larger ones, which go back to the system at once: 4 MiB in
# most runs, 31 MiB in the worst of those that were measured.
KEPT_FREE = 8 << 20


class HostMemory:
    """An array per persistent storage, and one for the slots of each home: here all of them are alike."""

    homes_in_order = frozenset({"device", "host"})

    def __init__(self, persistent: Mapping[str, Ref], arena_bytes: Mapping[str, int]) -> None:
        self._arrays = {
            name: np.zeros(stored_shape(ref.shape, ref.form), stored_dtype(ref)) for name, ref in persistent.items()
        }
        self._arenas = {home: np.zeros(num_bytes, np.uint8) for home, num_bytes in arena_bytes.items()}

    def array(self, name: str) -> np.ndarray:
        """The storage itself."""
        return self._arrays[name]

    def place(self, home: str, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array at an offset of an arena."""
        size = math.prod(shape) * dtype.itemsize
        return self._arenas[home][offset : offset + size].view(dtype).reshape(shape)

    def write(self, name: str, values: Values) -> None:
        """Sets a storage from host values of any float dtype, rounded to nearest even."""
        # Rounded on the way: a copy of billions would be a pass over new pages.
        self._arrays[name][...] = np.asarray(values)

    @contextmanager
    def room(self, home: str) -> Iterator[Room]:
        """Where the copies of what is held in a home are made."""
        with np.errstate(all="ignore"):
            yield HostRoom()

    def read(self, name: str, into: np.ndarray | None = None) -> np.ndarray:
        """A copy of a storage on the host, in memory of its own or `into` an array of its shape and dtype."""
        if into is None:
            return self._arrays[name].copy()
        into[...] = self._arrays[name]
        return into

    def start_read(self, name: str) -> Callable[[], np.ndarray]:
        """A function that returns a copy of a storage, made now."""
        copy = self.read(name)
        return lambda: copy

    def read_scalars(self, names: Sequence[str]) -> list[float]:
        """First elements of some storages."""
        return [float(self._arrays[name].flat[0]) for name in names]

    def fill(self, name: str, value: float) -> None:
        """Sets every element of a storage."""
        set_every(self._arrays[name], value)

    def in_turn(self) -> AbstractContextManager[None]:
        """Nothing to wait for: all is done when a call returns."""
        return nullcontext()

    def borrow(self, names: Iterable[str], other: BackendMemory) -> None:
        """Makes storages of another memory ones of this."""
        self._arrays |= {name: other.array(name) for name in names}


def set_every(array: np.ndarray, value: float) -> None:
    """Sets every element of a contiguous array, to zero at the speed of memory.

    NumPy writes zeros of a dtype that is not its own a number at a time: 2.4 GB/s of fp8, where bytes take 51.
    """
    if value == 0:
        array.reshape(-1).view(np.uint8).fill(0)
    else:
        array.fill(value)


class HostBackend:
    """The reference ops on the host's memory."""

    takes_scratch = False

    def __init__(self, algorithms: Mapping[str, Any] | None = None, *, world: World = ALONE) -> None:
        self.world = world
        self.ops: Mapping[str, Op] = between(world, reference.OPS)
        self.algorithms: Mapping[str, Any] = algorithms or {}
        self.notices: Sequence[str] = ()
        self.allocated = ""

    def scratch_bytes(self, call: Call) -> int:
        """What NumPy allocates while a call runs, and malloc keeps of other calls: counted by the plan, not held."""
        size = temporary_bytes(call)
        return size + min(size, KEPT_FREE)

    def prepare(self, calls: Iterable[Call], report: Report = unreported) -> None:
        """Nothing to do."""

    def take(self, algorithms: Mapping[str, Any]) -> None:
        """Computes with as many threads as another rank."""
        self.algorithms = {**algorithms}
        use_blas_threads(algorithms.get(BLAS_THREADS))

    def peak_bytes(self) -> int:
        """Largest resident size of this process."""
        return peak_resident_bytes()

    def host_bytes(self, num_bytes: int) -> np.ndarray:
        """Ordinary memory."""
        return np.empty(num_bytes, np.uint8)

    def memory(self, needs: Needs) -> HostMemory:
        """Arrays of the host, which are all of one kind. RefusedMemoryError if it has too little: the kernel gives more
        than there is, and ends the process when that is written."""
        held = {name: ref for name, ref in needs.persistent.items() if self.takes_scratch or ref.space != "workspace"}
        num_bytes = sum(map(stored_bytes, held.values())) + sum(needs.arena_bytes.values())
        if num_bytes > (free := host_memory_bytes()[1]):
            raise RefusedMemoryError(f"the host refused {shown(num_bytes)}", num_bytes=num_bytes, free_bytes=free)
        return HostMemory(held, needs.arena_bytes)

    def program(self, launches: Sequence[Launch]) -> Run:
        """One function that makes all launches in the order of recording, which every lane allows."""
        runs = [run for each in groups(launches) for run in (*each.before, *each.runs, *each.after)]

        def run() -> None:
            with np.errstate(all="ignore"):  # what is not finite is caught by the update, on every backend alike
                for each in runs:
                    each()

        return run
