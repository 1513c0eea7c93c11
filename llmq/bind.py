"""Programs bound to memory and a backend: every step becomes one call with nothing left to decide."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from llmq.arena import stored_dtype
from llmq.backends import Call, Memory, Op
from llmq.plan.plan import SCALE_STRIDE, Plan
from llmq.plan.program import Operand, Program, Result
from llmq.tensor import Output, Tensor, scale_shape, scales_of_rows, stored_shape

UNWANTED = Output("unwanted", (), "fp32", ())


def bind(plan: Plan, name: str, memory: Memory, ops: Mapping[str, Op], *, poison: bool) -> list[Call]:
    """The calls of a program, in order. With `poison`, activations are filled with 0xFF bytes (NaN in every float
    format) before their first write and after their last read."""
    binder = _Binder(plan, plan.programs[name], memory)
    calls: list[Call] = []
    for index, step in enumerate(binder.program.steps):
        if poison:
            calls += [partial(binder.raw(storage).fill, 0xFF) for storage in binder.program.births.get(index, ())]
        outputs = [UNWANTED if result is None else binder.output(result) for result in step.outputs]
        inputs = [None if operand is None else binder.tensor(operand) for operand in step.inputs]
        calls.append(partial(ops[step.op], *outputs, *inputs, **step.numbers))
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
        width = ref.shape[-1]
        return whole if ref.span is None else scales_of_rows(whole, ref.form, *(n // width for n in ref.span))

    def _cell(self, vector: str, index: int) -> np.ndarray:
        return self._memory.array(vector)[index : index + 1]

    def _array(self, operand: Operand) -> np.ndarray:
        ref, place = operand.ref, self.program.places.get(operand.storage)
        if ref.span is None:
            shape = stored_shape(ref.shape, ref.form)
            if place is None:
                return self._memory.array(operand.storage)
            return self._memory.place(place.offset, shape, stored_dtype(ref))
        start, size = ref.span
        dtype = stored_dtype(ref)
        if ref.form is not None and ref.form.layout != "row":
            assert ref.form.layout == "col" and place is not None, f"{operand.storage}: no pieces of {ref.form}"
            whole = self._memory.place(place.offset, stored_shape(ref.whole, ref.form), dtype)
            width = ref.whole[-1]
            return whole[:, start // width : (start + size) // width]
        if place is None:
            return self._memory.array(operand.storage).reshape(-1)[start : start + size].reshape(ref.shape)
        return self._memory.place(place.offset + start * dtype.itemsize, ref.shape, dtype)
