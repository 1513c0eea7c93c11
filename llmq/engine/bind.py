"""Programs bound to memory and a backend: every call becomes one launch with nothing left to decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np

from llmq.backends import BackendMemory, Launch, Op
from llmq.operands import Output, Tensor, scales_of_columns, scales_of_rows
from llmq.ops.record import Call, Result
from llmq.ops.seam import record
from llmq.plan.arena import stored_dtype
from llmq.plan.names import own_scales, scale_cell, scale_ref, storage_name
from llmq.plan.passes.place import Program
from llmq.plan.plan import SCALE_STRIDE, Plan, Scratch, scratch_storage
from llmq.tensor import Ref, stored_shape

UNWANTED = Output("unwanted", (), "fp32", ())


def bind(
    plan: Plan,
    name: str,
    memory: BackendMemory,
    ops: Mapping[str, Op],
    scratch_bytes: Scratch | None = None,
    *,
    poison: bool,
) -> list[Launch]:
    """The calls of a program, in order.

    Calls that need scratch by `scratch_bytes` get that of their lane as `scratch`; None: ops make their own. With
    `poison`, slots are filled with 0xFF bytes (NaN in every float format) before their first write and after their last
    read.
    """
    binder = _Binder(plan, plan.programs[name], memory)
    launches = []
    for index, call in enumerate(binder.program.calls):
        needs = scratch_bytes is not None and scratch_bytes(call) > 0
        scratch = {"scratch": memory.array(scratch_storage(call.lane))} if needs else {}
        launches.append(binder.launch(index, call, partial(ops[call.op], **scratch), poison))
    return launches


class _Binder:
    def __init__(self, plan: Plan, program: Program, memory: BackendMemory) -> None:
        self.program, self._memory = program, memory
        self._cells = {cell: SCALE_STRIDE * index for index, cell in enumerate(plan.scales)}

    def launch(self, index: int, call: Call, op: Op, poison: bool) -> Launch:
        """One call, with the slots that begin and end with it poisoned around it."""
        refs = [*(ref for ref in call.inputs if ref is not None), *call.written]
        has_columns = any(ref.width != ref.shape[-1] for ref in refs)
        assert record(call.op).takes_columns or not has_columns, f"{call.op} reads and writes no columns alone"
        outputs = [UNWANTED if result is None else self._output(result) for result in call.outputs]
        inputs = [None if ref is None else self._tensor(ref) for ref in call.inputs]
        run: Callable[[], None] = partial(op, *outputs, *inputs, **call.numbers)
        if not call.collective and not any(math.prod(ref.shape) for ref in call.written):
            run = _nothing  # of a share without rows
        made = Launch(run, call.lane, call.waits, call.collective)
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
