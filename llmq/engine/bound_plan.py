"""A plan made flesh: memory allocated, programs bound to a backend, run by name, and storages read and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise

import numpy as np

from llmq.backends import Backend, Launch, Op, Run
from llmq.engine.advice import shortage
from llmq.engine.bind import bind
from llmq.errors import RefusedMemoryError
from llmq.model.held import Values, held_value, hold, single_scale
from llmq.operands import Tensor
from llmq.plan.names import scale_ref, storage_name
from llmq.plan.plan import Plan
from llmq.row import Row
from llmq.screen import Report, unreported
from llmq.tensor import DTYPES, Ref


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
        self,
        plan: Plan,
        backend: Backend,
        *,
        wrap: Callable[[str, Op], Op] | None = None,
        poison: bool = False,
    ) -> None:
        self.plan = plan
        self._backend, self._poison, self._cells = backend, poison, plan.cells
        make_ready(plan, backend)
        with explained(plan, backend):
            arenas = {home: plan.arena_bytes(home) for home in ("device", "host")}
            kept = plan.spec.memory
            about = {"in_place": kept.zero_copy, "write_combined": kept.write_combined}
            self._memory = backend.memory(plan.persistent, arenas, **about)
        self._ops = {name: wrap(name, op) for name, op in backend.ops.items()} if wrap else backend.ops
        self._programs: dict[int, Run] = {}  # by the id of the plan's program: those that are alike are bound once

    def _view(self, other: BoundPlan) -> None:
        """Makes this another view of a plan on memory: nothing is allocated, and programs are bound once for both."""
        self.plan, self._backend, self._poison, self._cells = other.plan, other._backend, other._poison, other._cells
        self._memory, self._ops, self._programs = other._memory, other._ops, other._programs

    def parameter(self, name: str) -> np.ndarray:
        """Master of a parameter, or a frozen one itself, padded, in its own dtype (a copy).

        One that is held in a form is given as the value of that. Where states are shared out, all ranks ask for the
        same parameters in the same order.
        """
        ref = self.plan.held(name)
        if ref.form is None:
            return self._whole(name, self.read(ref)) if self._is_shared(name) else self.read(ref)
        value = np.empty(ref.shape, DTYPES[ref.dtype])
        for one, target in zip(ref.entries, value if ref.is_stack else value[None], strict=True):
            copy = Tensor(one.name, self.read(one), one.shape, one.form, self.read(scale_ref(one)))
            target[...] = held_value(copy, one.dtype)
        return value

    def run(self, name: str) -> None:
        """Runs a program of the plan by name; it is bound on first use."""
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

    def _set(self, parameters: Iterable[tuple[Row, Values]], expected: Iterable[Row]) -> None:
        """Sets masters, or what is held of frozen rows, from the values of all `expected` rows."""
        with self._explained():
            self._set_each(parameters, {row.name for row in expected})

    def _set_each(self, parameters: Iterable[tuple[Row, Values]], missing: set[str]) -> None:
        for row, values in parameters:
            missing.discard(row.name)
            ref = self.plan.held(row.name)
            if ref.form is None:
                shared = self._is_shared(row.name)
                self._memory.write(storage_name(ref), self._share(row.name, np.asarray(values)) if shared else values)
                continue
            borders = () if ref.is_stack else tuple(part.stop for part in row.parts)
            for one, value in zip(ref.entries, np.asarray(values) if ref.is_stack else (values,), strict=True):
                self._hold(one, value, borders)
        assert not missing, f"parameters not given: {sorted(missing)}"

    def _hold(self, ref: Ref, values: Values, borders: Sequence[int]) -> None:
        """Makes what is held of a row, with the scales of what programs make of that, where it lies."""
        array, scale = (self._memory.array(storage_name(one)) for one in (ref, scale_ref(ref)))
        copy = Tensor(ref.name, array, ref.shape, ref.form, scale)
        with self._memory.room(ref.home) as room:
            hold(room, copy, ref.dtype, values, borders)
            for cell in self.plan.known_scales(ref):
                fp8 = cell.name.rpartition("@")[2]
                single_scale(room, self._memory.array(storage_name(cell)), copy, ref.dtype, fp8)

    def _is_shared(self, name: str) -> bool:
        """Whether this rank has no more of a parameter's state than its share, which may be nothing."""
        return self.plan.spec.sharding.states and name in self.plan.shards.bounds

    def _share(self, name: str, values: np.ndarray) -> np.ndarray:
        """This rank's rows of a whole parameter."""
        shards = self.plan.shards
        first = shards.bounds[name][shards.rank]
        found = values.reshape(-1, values.shape[-1])[first : first + shards.count(name)]
        return found.reshape(shards.share_shape(name, values.shape))

    def _whole(self, name: str, share: np.ndarray) -> np.ndarray:
        """A parameter of the shares of all ranks."""
        shards, shape = self.plan.shards, self.plan.shape(name)
        whole = np.empty(shape, share.dtype)
        pieces = [whole.reshape(-1, shape[-1])[start:stop] for start, stop in pairwise(shards.bounds[name])]
        self._backend.world.exchange([share.reshape(-1, shape[-1])] * shards.size, pieces)
        return whole

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
