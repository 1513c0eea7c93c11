"""A backend is ops, memory for a plan, and a way to run a list of calls again and again: NumPy's, the GPU's, or of a
GPU that is not here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from llmq.comm.world import World
from llmq.ops.record import together
from llmq.ops.seam import GIVEN, record
from llmq.screen import Report
from llmq.tensor import Ref

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

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
