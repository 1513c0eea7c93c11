"""A function on arrays: its operands are checked, its results allocated, and its ops run.

What depends on shapes alone is worked out once for all calls of equal shapes. A backend (`on_host`, `on_cuda`) gives
the arrays of operands, and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.axes import VALUES, parsed
from llmq.ops.exchange import DeviceArray, Operand, empty, operand, strides_of
from llmq.ops.seam import record
from llmq.tensor import DTYPES, Form, scale_shape, stored_shape

Allocate = Callable[[int], Any] | None
Numbers = Mapping[str, Any]
Next = Callable[[tuple[int, ...], str, tuple[int, ...] | None], Any]  # array of the next operand: shape, dtype, strides
Fits = tuple[tuple[int, ...], tuple[str, ...]]
New = Callable[[tuple[int, ...], str], Any]  # array that lives as long as the call
TAKEN = (DeviceArray, Operand)  # as they are
MOST_PLANS = 4096  # that are kept: shapes may never repeat

_plans: dict[Any, _Plan] = {}


class Given(NamedTuple):
    """An input: values, or a quantized copy of them with its scales. `shape` and `dtype` are those of the values."""

    data: Operand
    shape: tuple[int, ...]
    dtype: str
    form: Form | None = None
    scale: Operand | None = None

    @property
    def facts(self) -> tuple[Any, ...]:
        """What `of` makes a copy of."""
        return self.data[1:], *self[1:4], self.scale and self.scale[1:]

    @classmethod
    def of(cls, facts: tuple[Any, ...]) -> Given:
        """A copy, or the values of an operand, without their memory, which a plan would keep."""
        if len(facts) == len(Operand._fields) - 1:
            return cls(Operand(None, *facts), *facts[:2])
        data, shape, dtype, form, scale = facts
        return cls(Operand(None, *data), shape, dtype, form, Operand(None, *scale))

    def tensor(self, name: str, array: Next) -> Tensor:
        """It as ops read it: its array, and the one of its scales after it."""
        data = array(self.data.shape, self.form.dtype if self.form else self.data.dtype, self.data.strides)
        scale: Any = None if self.scale is None else array(self.scale.shape, self.scale.dtype, None)
        return Tensor(name, data, self.shape, self.form, scale)


def _output(name: str, result: Operand | None, array: Next) -> Output:
    """A result as ops write it; one that is not wanted is None."""
    if result is None:
        return Output(name, (), "fp32", ())
    _, shape, dtype, _, strides = result
    return Output(name, shape, dtype, (Tensor(name, array(shape, dtype, strides), shape),))


@dataclass(frozen=True, eq=False)
class Operands:
    """What a routine computes with: ops and operands by name. Inputs that are not given are None."""

    routine: str
    ops: Mapping[str, Callable[..., None]]
    outputs: Mapping[str, Output]
    inputs: Mapping[str, Tensor | None]
    numbers: Numbers
    dtype: str  # of the values
    new: New

    def run(self, op: str) -> None:
        """Runs the op that has these operands."""
        self.ops[op](*self.outputs.values(), *self.inputs.values(), **self.numbers)

    def given(self, name: str) -> Tensor:
        """An input that every call has."""
        found = self.inputs[name]
        assert found is not None
        return found

    def make(self, shape: tuple[int, ...], dtype: str, form: Form | None = None) -> Tensor:
        """A tensor that lives as long as the call, in a form with its scales."""
        scale = self.new(scale_shape(shape, form), form.scales.dtype) if form and form.scaling is not None else None
        return Tensor("made", self.new(stored_shape(shape, form), form.dtype if form else dtype), shape, form, scale)

    def refuse(self, name: str, is_wrong: Callable[[np.ndarray], Any], why: str) -> None:
        """UsageError for numbers of an input that are wrong; on a GPU, to look would be to wait."""
        array = self.given(name).array
        if isinstance(array, np.ndarray) and len(wrong := array[is_wrong(array)]):
            raise UsageError(f"{self.routine}: {name} have {wrong[0]}, {why}")


class _Plan(NamedTuple):
    """What calls of equal shapes share: their results (None: unwanted), and what runs them by how their memory lies."""

    device: int | None
    backend: Any
    results: dict[str, Operand | None]
    compute: Callable[[Mapping[str, Callable[..., None]], Next, New], None]
    bound: dict[Any, Callable[[list[Any], list[Any], Allocate], None]]


class Routine:
    """A function on arrays with operands of these `axes`, computed by `compute`.

    `lengths(known, numbers)` are those of letters that follow from others and from the numbers. With `takes_views`,
    operands need only be contiguous along their last axis.
    """

    def __init__(
        self,
        name: str,
        axes: str,
        compute: Callable[[Operands], None],
        lengths: Callable[[Mapping[str, int], Numbers], Mapping[str, int]] = lambda known, numbers: {},
        takes_views: bool = False,
    ) -> None:
        self.name, self.compute, self.lengths, self.takes_views = name, compute, lengths, takes_views
        self.outputs, self.inputs = parsed(axes)

    def __call__(
        self,
        *inputs: Any,
        numbers: Numbers = MappingProxyType({}),
        wanted: frozenset[str] | None = None,
        out: Any = None,
        allocate: Allocate = None,
    ) -> Any:
        """Runs it on arrays, copies and None: a tuple of its results, None for those not `wanted`, or the only one."""
        read: list[Any] = []
        facts: list[Any] = []
        for x, (name, axes) in zip(inputs, self.inputs.items(), strict=True):
            if type(x) is Given:
                read += (x.data.place,) if x.scale is None else (x.data.place, x.scale.place)
                facts.append(x.facts)
            elif x is None and axes.is_optional:
                facts.append(None)
            else:  # the first fields of DeviceArray are those of Operand
                found = x if type(x) in TAKEN else operand(x, name)
                read.append(found[0])
                facts.append(found[1:5])
        if out is None:
            into: Any = (None,) * len(self.outputs)
        else:
            into = (out,) if type(out) is DeviceArray or not isinstance(out, tuple | list) else out
        places = [x if x is None or type(x) is DeviceArray else operand(x, "out") for x in into]
        key = (self, (*numbers.values(),), wanted, (*facts,), *[x and x[1:5] for x in places])
        plan = _plans.get(key) or self._plan(key, facts, numbers, places, wanted)
        with plan.backend.on(plan.device):
            made: list[Any] = []
            written: list[Any] = []
            for result, array, place in zip(plan.results.values(), into, places, strict=True):
                if result is None:
                    made.append(None)
                    continue
                if place is None:
                    array = empty(result.shape, result.dtype, plan.device)
                    place = operand(array, "out")
                made.append(array)
                written.append(place[0])
            layout = plan.backend.layout(read, written)
            run = plan.bound.get(layout)
            if run is None:
                run = plan.bound[layout] = plan.backend.bind(plan.compute, layout)
            run(read, written, allocate)
        return tuple(made) if len(made) > 1 else made[0]

    def _plan(
        self, key: Any, facts: list[Any], numbers: Numbers, places: list[Any], wanted: frozenset[str] | None
    ) -> _Plan:
        """That of a new kind of call; UsageError for what does not fit."""
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        about = {name: fact and Given.of(fact) for name, fact in zip(self.inputs, facts, strict=True)}
        inputs = {name: x for name, x in about.items() if x is not None}
        device = self._device(inputs, places)
        dtype = self._dtype(inputs, device)
        known = self._lengths(inputs, numbers)
        if len(places) != len(self.outputs):
            raise self._wrong(f"out has {len(places)} arrays, not {len(self.outputs)}: {', '.join(self.outputs)}")
        results: dict[str, Operand | None] = dict.fromkeys(self.outputs)
        for name, place in zip(self.outputs, places, strict=True):
            if wanted is None or name in wanted:
                shape, dtypes = self.written(name, known, numbers, dtype)
                results[name] = Operand(None, shape, dtypes[0], device, None)
                if place is not None:
                    results[name] = self._placed(name, operand(place, "out"), shape, dtypes)

        def compute(ops: Mapping[str, Callable[..., None]], array: Next, new: New) -> None:
            given = {name: x and x.tensor(name, array) for name, x in about.items()}
            outputs = {name: _output(name, result, array) for name, result in results.items()}
            self.compute(Operands(self.name, ops, outputs, given, numbers, dtype, new))

        backend = import_module(f"llmq.ops.{'on_host' if device is None else 'on_cuda'}")
        plan = _plans[key] = _Plan(device, backend, results, compute, {})
        return plan

    def written(self, name: str, known: Mapping[str, Any], numbers: Numbers, dtype: str) -> Fits:
        """Of an output beside values in a dtype: its shape, and its possible dtypes; a new one is in the first."""
        return self.outputs[name].shape(known), self.outputs[name].dtypes(dtype)

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"{self.name}: {what}")

    def _placed(self, name: str, place: Operand, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Operand:
        """A result in memory that is given, without that memory."""
        if place.shape != shape or place.dtype not in dtypes:
            raise self._wrong(f"out for {name} is {place.shape} in {place.dtype}, not {shape} in {' or '.join(dtypes)}")
        self._check_place(f"out for {name}", place)
        return place._replace(place=None, dtype=dtypes[0] if place.dtype == "uint8" else place.dtype)  # bytes of fp8

    def _check_place(self, name: str, x: Operand) -> None:
        """UsageError for memory that is not laid out as the routine takes it."""
        if not math.prod(x.shape):
            raise self._wrong(f"{name} {x.shape} has no elements")
        if x.strides is None or x.strides == (whole := strides_of(x.shape, DTYPES[x.dtype].itemsize)):
            return
        if not self.takes_views or x.strides[-1] != whole[-1]:
            raise self._wrong(f"{name} {x.shape} is not contiguous: copy it first")

    def _check_copy(self, name: str, x: Given, form: Form, scale: Operand) -> None:
        """UsageError for a copy whose arrays are not those of its values in its form."""
        self._check_place(f"the scale of {name}", scale)
        shape, scales = stored_shape(x.shape, form), (scale_shape(x.shape, form), form.scales.dtype)
        if x.data.shape != shape or x.data.dtype not in (form.dtype, "uint8") or scale[1:3] != scales:
            found = f"{x.data.shape} in {x.data.dtype} with scales {scale.shape} in {scale.dtype}"
            fits = f"{shape} in {form.dtype} with scales {scales[0]} in {scales[1]}"
            raise self._wrong(f"{name}, a copy of {x.shape}, is {found}, not {fits}: use ops.quantize")

    def _lengths(self, inputs: Mapping[str, Given], numbers: Numbers) -> dict[str, Any]:
        """Of letters; UsageError for inputs that do not fit each other."""
        known: dict[str, Any] = {}
        owners: dict[str, str] = {}  # the input that a letter's length comes from
        for name, x in inputs.items():
            axes = self.inputs[name]
            self._check_place(name, x.data)
            if x.form is not None and x.scale is not None:
                self._check_copy(name, x, x.form, x.scale)
            if not axes.fit(x.shape):
                raise self._wrong(f"{name} {x.shape} is not {axes}")
            for letter, length in axes.lengths(x.shape):
                owner = owners.setdefault(letter, name)
                if known.setdefault(letter, length) != length:
                    other = f"{owner} {inputs[owner].shape}, {self.inputs[owner]}"
                    raise self._wrong(f"{name} {x.shape}, {axes}, does not fit {other}")
        for letter, length in self.lengths(known, numbers).items():
            if known.setdefault(letter, length) != length:
                what = f"{owners[letter]} is {inputs[owners[letter]].shape}"
                raise self._wrong(f"{what}, and {length} would fit, not {known[letter]}")
        return known

    def _dtype(self, inputs: Mapping[str, Given], device: int | None) -> str:
        """That of the values; UsageError where they have many, or where another operand has a wrong one."""
        first = next(name for name in inputs if not self.inputs[name].kind)
        dtype = inputs[first].dtype
        if dtype not in VALUES:
            raise self._wrong(f"{first} is in {dtype}: use {', '.join(VALUES)}")
        if dtype == "fp64" and device is not None:
            raise self._wrong(f"{first} is in fp64, which kernels of the GPU lack: use fp32 or bf16, or the CPU")
        for name, x in inputs.items():
            wanted = self.inputs[name].dtypes(dtype)
            if x.dtype not in wanted:
                raise self._wrong(f"{name} is in {x.dtype}, not {wanted[0]}, where {first} is in {dtype}")
        return dtype

    def _device(self, inputs: Mapping[str, Given], places: list[Any]) -> int | None:
        """Where all operands are; UsageError for those of two devices."""
        operands = [(name, x.data) for name, x in inputs.items()]
        operands += [(f"the scale of {name}", x.scale) for name, x in inputs.items() if x.scale is not None]
        operands += [("out", place) for place in places if place is not None]
        names = {x.device: f"{name} on {'the CPU' if x.device is None else f'GPU {x.device}'}" for name, x in operands}
        if len(names) > 1:
            raise self._wrong(f"{' and '.join(names.values())}: move them to one device")
        return next(iter(names))


def single(op: str, axes: str, name: str = "", check: Callable[[Operands], None] | None = None, **more: Any) -> Routine:
    """The routine of one op, whose operands these are; `check` looks at their numbers."""

    def compute(operands: Operands) -> None:
        if check is not None:
            check(operands)
        operands.run(op)

    routine, about = Routine(name or op.removesuffix("_forward"), axes, compute, **more), record(op)
    assert (about.outputs, about.inputs) == ((*routine.outputs,), (*routine.inputs,)), op
    return routine
