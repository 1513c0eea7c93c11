"""A backend is ops, memory for a plan, and a way to run a list of calls again and again: NumPy's, the GPU's, or of a
GPU that is not here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import groupby
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from llmq.comm.world import ALONE, World
from llmq.hardware.cores import use_blas_threads
from llmq.ops.record import together
from llmq.ops.seam import GIVEN, record
from llmq.plugins import Table, table
from llmq.screen import Report
from llmq.tensor import Ref

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from llmq.comm.nccl import NcclWorld
    from llmq.model.held import Room, Values
    from llmq.ops.record import Call

Op = Callable[..., None]
Run = Callable[[], None]


class Launch(NamedTuple):
    """One call of a program, bound to memory: it runs on its lane, after the calls whose indices are in `waits`.
    `collective` names the op of one: those that `groups` puts together may be made as one. `before` and `after` of
    these run before and after all of them. What `is_python` is called each time, in no graph."""

    run: Run
    lane: str = "main"
    waits: tuple[int, ...] = ()
    collective: str = ""
    before: tuple[Run, ...] = ()
    after: tuple[Run, ...] = ()
    is_python: bool = False


class Together(NamedTuple):
    """Launches by their indices, one or collectives that may be made as one, and what they run in turn."""

    indices: list[int]
    before: list[Run]
    runs: list[Run]
    after: list[Run]


def groups(launches: Sequence[Launch]) -> Iterator[Together]:
    """All launches in order."""
    for indices in together(launches):
        found = [launches[index] for index in indices]
        before = [run for each in found for run in each.before]
        after = [run for each in found for run in each.after]
        yield Together(indices, before, [each.run for each in found], after)


def parts(launches: Sequence[Launch]) -> Iterator[list[Launch]]:
    """Launches that a graph may have, and those that run Python, in turn. A part begins when all lanes have done what
    is before it, and so waits for launches of its own alone."""
    start = 0
    for part in [list(found) for _, found in groupby(launches, key=lambda each: each.is_python)] or [[]]:
        yield [each._replace(waits=tuple(other - start for other in each.waits if other >= start)) for each in part]
        start += len(part)


def in_turn(runs: Sequence[Run]) -> Run:
    """One function for all of them."""

    def run() -> None:
        for each in runs:
            each()

    return runs[0] if len(runs) == 1 else run


class Needs(NamedTuple):
    """What a plan asks of memory: persistent storages by name, and the bytes of an arena in each home. That of the
    host is for ops to read and write `in_place`, or `write_combined`, where there is such a difference."""

    persistent: Mapping[str, Ref]
    arena_bytes: Mapping[str, int]
    in_place: bool = False
    write_combined: bool = False


class BackendMemory(Protocol):
    """Persistent storages by name, and an arena in each home for the slots of a program.

    `start_read` copies a storage as it is after all that was run before, and returns what waits for the copy.
    `room` is where held copies in a home are made, while no program runs: their slices take the place of its slots.
    Within `in_turn` work on arrays is done in the order of programs, after what the caller has begun on the device;
    when it ends, all of that is done. `borrow` makes storages of another memory, which it keeps, ones of this, too.
    `homes_in_order` are those that a launch fills when its turn comes; elsewhere, Python would be too early.
    """

    homes_in_order: frozenset[str]

    def array(self, name: str) -> np.ndarray: ...
    def place(self, home: str, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray: ...
    def write(self, name: str, values: Values) -> None: ...
    def room(self, home: str) -> AbstractContextManager[Room]: ...
    def read(self, name: str, into: np.ndarray | None = None) -> np.ndarray: ...
    def start_read(self, name: str) -> Callable[[], np.ndarray]: ...
    def read_scalars(self, names: Sequence[str]) -> list[float]: ...
    def fill(self, name: str, value: float) -> None: ...
    def in_turn(self) -> AbstractContextManager[None]: ...
    def borrow(self, names: Iterable[str], other: BackendMemory) -> None: ...


class Backend(Protocol):
    """What the engine needs of a device. `prepare` comes before memory is allocated, with all calls of the plan; it
    reports how many matrix products have their algorithm.

    `world` are the ranks of the run, which collectives are between.

    `takes_scratch` says whether ops are given the bytes that `scratch_bytes` counts, as an argument `scratch`, or
    allocate them themselves, as NumPy does. `algorithms` is what decides the bits of matrix products, as plain data;
    `notices` what the user should know of the device; `allocated` says how long host memory took, if there was any
    to be allocated; `peak_bytes` the most memory used so far. `host_bytes` takes host
    memory into which the device copies fast.
    """

    @property
    def world(self) -> World: ...
    @property
    def takes_scratch(self) -> bool: ...
    @property
    def algorithms(self) -> Mapping[str, Any]: ...
    @property
    def notices(self) -> Sequence[str]: ...
    @property
    def allocated(self) -> str: ...
    @property
    def ops(self) -> Mapping[str, Op]: ...
    def scratch_bytes(self, call: Call) -> int: ...
    def prepare(self, calls: Iterable[Call], report: Report = ...) -> None: ...
    def take(self, algorithms: Mapping[str, Any]) -> None: ...
    def peak_bytes(self) -> int: ...
    def host_bytes(self, num_bytes: int) -> np.ndarray: ...
    def memory(self, needs: Needs) -> BackendMemory: ...
    def program(self, launches: Sequence[Launch]) -> Run: ...


def between(world: World, ops: Mapping[str, Op]) -> dict[str, Op]:
    """The ops, of which collectives are between the ranks of `world`."""
    return {name: partial(op, **{GIVEN: world}) if record(name).is_collective else op for name, op in ops.items()}


def open_backend(
    device: str,
    *,
    world: World = ALONE,
    use_graphs: bool = True,
    deterministic: bool = True,
    algorithms: Mapping[str, Any] | None = None,
    capability: tuple[int, int] | None = None,
) -> Backend:
    """The backend of a device: `cpu`, `cuda` on the current GPU, or `planned` for a GPU that is not here; of one of the
    ranks of `world`, or of a run that has no others.

    The CPU is always deterministic. `algorithms` are those of an earlier run, whose bits are then repeated.
    `capability` is that of a GPU that is planned for: (9, 0).
    """
    return cast("Backend", BACKENDS.call(device, Settings(world, use_graphs, deterministic, algorithms, capability)))


def begin_opening(device: str, gpu: int) -> None:
    """Begins, in a thread, what the backend of a device waits for when it is opened: imports, and CUDA's context on the
    GPU of a number. What fails there fails again when it is opened, which says so."""

    def begin() -> None:
        with suppress(Exception):
            cuda = import_module("llmq.backends.cuda")
            cuda.cupy.cuda.Device(gpu).use()
            cuda.runtime.free(0)  # which makes the context

    if device == "cuda":
        Thread(target=begin, name="llmq-cuda").start()


class Settings(NamedTuple):
    """What `open_backend` was asked for."""

    world: World
    use_graphs: bool
    deterministic: bool
    algorithms: Mapping[str, Any] | None
    capability: tuple[int, int] | None


# Backends take their protocols from here, and are imported when they are opened.
def _host(asked: Settings) -> Backend:
    from llmq.backends.host import BLAS_THREADS, HostBackend

    threads = use_blas_threads((asked.algorithms or {}).get(BLAS_THREADS))
    return HostBackend({BLAS_THREADS: threads} if threads else {}, world=asked.world)


def _cuda(asked: Settings) -> Backend:
    from llmq.backends.cuda import CudaBackend
    from llmq.backends.host import BLAS_THREADS

    # None of a run that began on the CPU.
    given = None if asked.algorithms and BLAS_THREADS in asked.algorithms else asked.algorithms
    gpus = cast("NcclWorld", asked.world)
    return CudaBackend(use_graphs=asked.use_graphs, deterministic=asked.deterministic, given=given, world=gpus)


def _planned(asked: Settings) -> Backend:
    from llmq.backends.planned import ANY_CARD, PlannedBackend

    made = PlannedBackend(deterministic=asked.deterministic, capability=asked.capability or ANY_CARD)
    return cast("Backend", made)


BACKENDS: Table[Callable[..., Backend]] = table(
    "backend", {"cpu": _host, "cuda": _cuda, "planned": _planned}, gives=("memory", "program")
)
