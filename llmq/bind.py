"""Programs bound to memory and a backend: every step becomes one call with nothing left to decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from llmq.arena import stored_dtype
from llmq.backends import Call, Memory, Op
from llmq.ops.seam import record
from llmq.plan.plan import SCALE_STRIDE, Plan, scratch_storage
from llmq.plan.program import Operand, Program, Result, Step
from llmq.tensor import Output, Tensor, scale_shape, scales_of_columns, scales_of_rows, stored_shape

UNWANTED = Output("unwanted", (), "fp32", ())


def bind(
    plan: Plan,
    name: str,
    memory: Memory,
    ops: Mapping[str, Op],
    scratch_bytes: Callable[[Step], int] | None = None,
    *,
    poison: bool,
) -> list[Call]:
    """The calls of a program, in order.

    Calls that need scratch by `scratch_bytes` get that of their lane as `scratch`; None: ops make their own. With
    `poison`, activations are filled with 0xFF bytes (NaN in every float format) before their first write and after
    their last read.
    """
    binder = _Binder(plan, plan.programs[name], memory)
    calls: list[Call] = []
    for index, step in enumerate(binder.program.steps):
        if poison:
            calls += [partial(binder.raw(storage).fill, 0xFF) for storage in binder.program.births.get(index, ())]
        operands = [operand for operand in step.inputs if operand is not None]
        operands += [operand for result in step.outputs if result is not None for operand in result.operands]
        takes_columns = record(step.op).is_linear
        assert takes_columns or not any(o.ref.pitch for o in operands), f"{step.op} reads and writes no columns alone"
        outputs = [UNWANTED if result is None else binder.output(result) for result in step.outputs]
        inputs = [None if operand is None else binder.tensor(operand) for operand in step.inputs]
        needs = scratch_bytes is not None and scratch_bytes(step) > 0
        scratch = {"scratch": memory.array(scratch_storage(record(step.op).lane))} if needs else {}
        calls.append(partial(ops[step.op], *outputs, *inputs, **step.numbers, **scratch))
        if poison:
            calls += [partial(binder.raw(storage).fill, 0xFF) for storage in binder.program.deaths.get(index, ())]
    return calls


class _Binder:
    def __init__(self, plan: Plan, program: Program, memory: Memory) -> None:
        self.program, self._memory = program, memory
        self._cells = {f"scale:{cell}": SCALE_STRIDE * index for index, cell in enumerate(plan.scales)}

    def raw(self, storage: str) -> np.ndarray:
        """All bytes of an activation."""
        place = self.program.places[storage]
        return self._memory.place(place.offset, (place.size,), np.dtype(np.uint8))

    def output(self, result: Result) -> Output:
        tensors = tuple(self.tensor(operand) for operand in result.operands)
        amax = {cell: self._cell("scale:amax", self._cells[f"scale:{cell}"]) for cell in result.amax}
        return Output(result.ref.name, result.ref.shape, result.ref.dtype, tensors, result.accumulate, amax)

    def tensor(self, operand: Operand) -> Tensor:
        scale = None if operand.scale is None else self._scale(operand)
        return Tensor(operand.storage, self._array(operand), operand.ref.shape, operand.ref.form, scale)

    def _scale(self, operand: Operand) -> np.ndarray:
        name, ref = str(operand.scale), operand.ref
        if name in self._cells:
            return self._cell("scale:scales", self._cells[name])
        assert ref.form is not None
        if name in self.program.places:
            shape = scale_shape(ref.whole or ref.shape, ref.form)
            whole = self._memory.place(self.program.places[name].offset, shape, np.dtype(np.float32))
        else:
            whole = self._memory.array(name)
        if ref.span is None:
            return whole
        rows, columns = ref.window
        if rows != slice(0, math.prod(ref.whole[:-1])):
            whole = scales_of_rows(whole, ref.form, rows.start, rows.stop - rows.start)
        if columns != slice(0, ref.whole[-1]):
            whole = scales_of_columns(whole, ref.form, columns.start, columns.stop - columns.start)
        return whole

    def _cell(self, vector: str, index: int) -> np.ndarray:
        return self._memory.array(vector)[index : index + 1]

    def _array(self, operand: Operand) -> np.ndarray:
        ref = operand.ref
        if ref.span is None:
            return self._stored(operand, ref.shape)
        layout = ref.form.layout if ref.form is not None else "row"
        assert layout != "colsum", f"{operand.storage}: no pieces of {ref.form}"
        stored = self._stored(operand, ref.whole)
        if layout == "col" or ref.pitch:
            rows, columns = ref.window
            return stored[columns, rows] if layout == "col" else stored.reshape(-1, ref.pitch)[rows, columns]
        start, size = ref.span
        return stored.reshape(-1)[start : start + size].reshape(ref.shape)

    def _stored(self, operand: Operand, whole: tuple[int, ...]) -> np.ndarray:
        """All bytes of a storage that holds a tensor of the logical shape `whole`."""
        place = self.program.places.get(operand.storage)
        if place is None:
            return self._memory.array(operand.storage)
        return self._memory.place(place.offset, stored_shape(whole, operand.ref.form), stored_dtype(operand.ref))
