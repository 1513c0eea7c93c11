"""A plan made flesh: memory allocated, every call one launch with nothing left to decide, programs run by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np

from llmq.backends import Backend, BackendMemory, Launch, Needs, Op, Run
from llmq.engine.advice import shortage
from llmq.errors import RefusedMemoryError
from llmq.operands import Output, Tensor, scales_of_columns, scales_of_rows
from llmq.ops.record import Call, Result
from llmq.ops.seam import record
from llmq.plan.names import own_scales, scale_cell, scale_ref, storage_name
from llmq.plan.plan import SCALE_STRIDE, Plan, Scratch, scratch_storage
from llmq.screen import Report, unreported
from llmq.tensor import Ref, stored_dtype, stored_shape

UNWANTED = Output("unwanted", (), "fp32", ())


class Binder:
    """What a program of a plan is bound to."""

    def __init__(self, plan: Plan, name: str, memory: BackendMemory) -> None:
        self.program, self._memory = plan.programs[name], memory
        self._cells = {cell: SCALE_STRIDE * index for index, cell in enumerate(plan.scales)}

    def launches(self, ops: Mapping[str, Op], scratch_bytes: Scratch | None, *, poison: bool) -> list[Launch]:
        """The calls, in order.

        Calls that need scratch by `scratch_bytes` get that of their lane as `scratch`; None: ops make their own. With
        `poison`, slots are filled with 0xFF bytes (NaN in every float format) before their first write and after their
        last read.
        """
        found = []
        for index, call in enumerate(self.program.calls):
            needs = scratch_bytes is not None and scratch_bytes(call) > 0
            scratch = {"scratch": self._memory.array(scratch_storage(call.lane))} if needs else {}
            found.append(self._launch(index, call, partial(ops[call.op], **scratch), poison))
        return found

    def _launch(self, index: int, call: Call, op: Op, poison: bool) -> Launch:
        """One call, with the slots that begin and end with it poisoned around it."""
        refs = [*(ref for ref in call.inputs if ref is not None), *call.written]
        has_columns = any(ref.width != ref.shape[-1] for ref in refs)
        assert record(call.op).takes_columns or not has_columns, f"{call.op} reads and writes no columns alone"
        outputs = [UNWANTED if result is None else self._output(result) for result in call.outputs]
        inputs = [None if ref is None else self._tensor(ref) for ref in call.inputs]
        run: Callable[[], None] = partial(op, *outputs, *inputs, **call.numbers)
        if not call.collective and not any(math.prod(ref.shape) for ref in call.written):
            run = _nothing  # of a share without rows
        made = Launch(run, call.lane, call.waits, call.collective, is_python=record(call.op).is_python)
        if not poison:
            return made
        before, after = (self._poison(found.get(index, ())) for found in (self.program.births, self.program.deaths))
        return made._replace(before=before, after=after)

    def _poison(self, storages: Iterable[str]) -> tuple[Callable[[], None], ...]:
        places = [self.program.places[storage] for storage in storages]
        bytes_of = [(place.home, place.offset, (place.size,), np.dtype(np.uint8)) for place in places]
        there = [at for at in bytes_of if at[0] in self._memory.homes_in_order]
        return tuple(partial(self._memory.place(*at).fill, 0xFF) for at in there)

    def _output(self, result: Result) -> Output:
        ref, tensors = result.ref, tuple(map(self._tensor, result.refs))
        amax = {cell: self._cell("amax", cell) for cell in result.amax}
        return Output(ref.name, ref.shape, ref.dtype, tensors, result.accumulate, amax)

    def _tensor(self, ref: Ref) -> Tensor:
        scaled = ref.form is not None and ref.form.scaling is not None
        return Tensor(storage_name(ref), self._array(ref), ref.shape, ref.form, self._scale(ref) if scaled else None)

    def _scale(self, ref: Ref) -> np.ndarray:
        assert ref.form is not None
        if ref.form.has_cell:
            return self._cell("scales", scale_cell(ref, ref.form.dtype))
        whole = self._whole(own_scales(ref) if ref.form.owns_scales else scale_ref(ref))
        if ref.view is None:
            return whole
        rows, columns = ref.window
        # A piece as long as the whole is not cut along that axis: not all scales can be.
        if rows != slice(0, math.prod(ref.whole[:-1])):
            whole = scales_of_rows(whole, ref.form, rows.start, rows.stop - rows.start)
        if columns != slice(0, ref.whole[-1]):
            whole = scales_of_columns(whole, ref.form, columns.start, columns.stop - columns.start)
        return whole

    def _cell(self, vector: str, cell: str) -> np.ndarray:
        start = self._cells[cell]
        return self._memory.array(f"scale:{vector}")[start : start + 1]

    def _array(self, ref: Ref) -> np.ndarray:
        whole = self._whole(ref)
        if ref.view is None:
            return whole
        layout = ref.form.layout if ref.form is not None else "row"
        assert layout != "colsum", f"{storage_name(ref)}: no pieces of {ref.form}"
        if layout == "col" or ref.view.pitch:
            rows, columns = ref.window
            return whole[columns, rows] if layout == "col" else whole.reshape(-1, ref.width)[rows, columns]
        return whole.reshape(-1)[ref.start : ref.start + ref.view.size].reshape(ref.shape)

    def _whole(self, ref: Ref) -> np.ndarray:
        """The array of the whole tensor that a Ref is, or is a piece of."""
        storage = storage_name(ref)
        place = self.program.places.get(storage)
        if place is None:
            return self._memory.array(storage)
        shape = stored_shape(ref.whole, ref.form)
        return self._memory.place(place.home, place.offset, shape, stored_dtype(ref))


def _nothing() -> None:
    pass


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
        return Binder(self.plan, name, self._memory).launches(ops, scratch_bytes, poison=poison)

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

    def _numbers(self, cells: Any, *names: str) -> dict[str, float]:
        """The numbers in cells by name, of those that the plan has."""
        refs = {name: ref for name in names if (ref := getattr(cells, name, None)) is not None and self._has(ref)}
        return dict(zip(refs, self._memory.read_scalars([*map(storage_name, refs.values())]), strict=True))

    def _fill(self, ref: Ref, value: float) -> None:
        self._memory.fill(storage_name(ref), value)
