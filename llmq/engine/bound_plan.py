"""A plan made flesh: memory allocated, programs bound to a backend, run by name, and storages read and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from llmq.backends import Backend, Launch, Needs, Op, Run
from llmq.engine.advice import shortage
from llmq.engine.bind import bind
from llmq.errors import RefusedMemoryError
from llmq.plan.names import storage_name
from llmq.plan.plan import Plan
from llmq.screen import Report, unreported
from llmq.tensor import Ref


@contextmanager
def explained(plan: Plan, backend: Backend, *, is_held: bool = False) -> Iterator[None]:
    """Memory that is refused within becomes an error that says what would fit."""
    try:
        yield
    except (RefusedMemoryError, MemoryError) as error:
        raise shortage(plan, backend, error, is_held=is_held) from error


def make_ready(plan: Plan, backend: Backend, report: Report = unreported) -> None:
    """What a plan's calls need of the backend before memory is allocated; once made, it is there at once."""
    with explained(plan, backend):
        backend.prepare((call for program in plan.programs.values() for call in program.calls), report)


class BoundPlan:
    """Runs the programs of a plan. All arrays passed in and out are on the host.

    `wrap(name, function) -> function` may be put around every op (timing, checking); `poison` fills activations with
    NaN before their first write and after their last read.
    """

    def __init__(
        self, plan: Plan, backend: Backend, *, wrap: Callable[[str, Op], Op] | None = None, poison: bool = False
    ) -> None:
        self.plan = plan
        self._backend, self._poison, self._cells = backend, poison, plan.cells
        make_ready(plan, backend)
        with explained(plan, backend):
            arenas = {home: plan.arena_bytes(home) for home in ("device", "host")}
            kept = plan.spec.memory
            needs = Needs(plan.persistent, arenas, in_place=kept.zero_copy, write_combined=kept.write_combined)
            self._memory = backend.memory(needs)
        self._ops = {name: wrap(name, op) for name, op in backend.ops.items()} if wrap else backend.ops
        self._programs: dict[int, Run] = {}  # by the id of the plan's program: those that are alike are bound once

    def _view(self, other: BoundPlan) -> None:
        """Makes this another view of a plan on memory: nothing is allocated, and programs are bound once for both."""
        self.plan, self._backend, self._poison, self._cells = other.plan, other._backend, other._poison, other._cells
        self._memory, self._ops, self._programs = other._memory, other._ops, other._programs

    def run(self, name: str) -> None:
        """Runs a program of the plan by name; it is bound on first use."""
        # By identity, as comparing programs call by call would take longer than a step.
        key = id(self.plan.programs[name])
        with self._explained():
            if key not in self._programs:
                self._programs[key] = self._backend.program(self._bound(name, self._ops, poison=self._poison))
            self._programs[key]()

    def traced(self, name: str, wrap: Callable[[str, Op], Op]) -> Run:
        """A program of the plan, with `wrap` around every op, that runs eagerly whenever it is called; for timing."""
        launches = self._bound(name, {op: wrap(op, function) for op, function in self._ops.items()})
        return lambda: self._backend.program(launches)()

    def part(self, name: str, indices: Iterable[int], before: Run | None = None) -> Run:
        """These calls of a program of the plan, each after `before`, as one of their own on one lane; for timing."""
        first = [] if before is None else [Launch(before)]
        launches = [launch._replace(lane="main", waits=()) for launch in self._bound(name, self._ops)]
        return self._backend.program([each for index in indices for each in (*first, launches[index])])

    def _bound(self, name: str, ops: Mapping[str, Op], *, poison: bool = False) -> list[Launch]:
        scratch_bytes = self._backend.scratch_bytes if self._backend.takes_scratch else None
        return bind(self.plan, name, self._memory, ops, scratch_bytes, poison=poison)

    def _has(self, ref: Ref) -> bool:
        """Whether any program reads or writes a tensor."""
        return storage_name(ref) in self.plan.persistent

    def _explained(self) -> AbstractContextManager[None]:
        """What is refused within is explained by the plan, whose memory is held."""
        return explained(self.plan, self._backend, is_held=True)

    def write(self, ref: Ref, values: np.ndarray) -> None:
        """Sets a tensor that stays."""
        with self._explained():
            self._memory.write(storage_name(ref), values)

    def read(self, ref: Ref) -> np.ndarray:
        """A copy of a tensor that stays."""
        with self._explained():
            return self._memory.read(storage_name(ref))

    def start_read(self, ref: Ref) -> Callable[[], np.ndarray]:
        """Begins to copy a tensor that stays; what is returned waits for the copy."""
        with self._explained():
            return self._memory.start_read(storage_name(ref))

    def _read_scalars(self, *refs: Ref) -> list[float]:
        return self._memory.read_scalars([storage_name(ref) for ref in refs])

    def _fill(self, ref: Ref, value: float) -> None:
        self._memory.fill(storage_name(ref), value)
