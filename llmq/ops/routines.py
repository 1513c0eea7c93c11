"""What a function on arrays computes: the axes of its operands, checked once for each set of shapes, and its ops.

Axes are letters, each of one length in a call; `...C` is any axes and then C. A word after them says the dtype: `stat`
is fp32, and fp64 beside values in fp64; `int` is int32; `grad` that of the values, or fp32. Without one it is the dtype
that all values of the call have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.exchange import Operand
from llmq.ops.seam import record
from llmq.tensor import DTYPES, Form, scale_shape

VALUES = ("bf16", "fp32", "fp64")
Numbers = Mapping[str, Any]


class Make(Protocol):
    """Gives memory that lives as long as the call: a tensor, in a form with its scales."""

    def __call__(self, shape: tuple[int, ...], dtype: str, form: Form | None = None) -> Tensor: ...


class Given(NamedTuple):
    """An input: values, or a quantized copy of them with its scales. `shape` and `dtype` are those of the values."""

    data: Operand
    shape: tuple[int, ...]
    dtype: str
    form: Form | None = None
    scale: Operand | None = None

    @property
    def facts(self) -> tuple[Any, ...]:
        """All but where it is."""
        return self.data[1:], *self[1:4], self.scale and self.scale[1:]

    @property
    def places(self) -> tuple[Any, ...]:
        """Of the array, and of its scales."""
        return (self.data.place,) if self.scale is None else (self.data.place, self.scale.place)


class Written(NamedTuple):
    """An array that a call writes, in one of `dtypes`; a new one is in the first, and contiguous."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    strides: tuple[int, ...] | None = None  # in bytes


def output(name: str, array: Any, result: Written | None) -> Output:
    """An output over its array; unwanted without a result."""
    if result is None:
        return Output(name, (), "fp32", ())
    return Output(name, result.shape, result.dtypes[0], (Tensor(name, array, result.shape),))


@dataclass(frozen=True, eq=False)
class Operands:
    """What a routine computes with: ops and operands by name. Inputs that are not given are None."""

    ops: Mapping[str, Callable[..., None]]
    make: Make
    outputs: Mapping[str, Output]
    inputs: Mapping[str, Tensor | None]
    numbers: Numbers
    dtype: str  # of the values

    def run(self, op: str) -> None:
        """Runs the op that has these operands."""
        about = record(op)
        outputs, inputs = (self.outputs[name] for name in about.outputs), (self.inputs[name] for name in about.inputs)
        self.ops[op](*outputs, *inputs, **self.numbers)

    def given(self, name: str) -> Tensor:
        """An input that every call has."""
        found = self.inputs[name]
        assert found is not None
        return found


@dataclass(frozen=True, eq=False)
class Routine:
    """A function on arrays: the axes of its outputs and inputs by name, in order, and what it computes.

    `lengths(known, numbers)` are those of letters that follow from others and from the numbers.
    """

    name: str
    outputs: Mapping[str, str]
    inputs: Mapping[str, str]
    compute: Callable[[Operands], None]
    lengths: Callable[[Mapping[str, int], Numbers], Mapping[str, int]] = lambda known, numbers: {}
    takes_views: bool = False  # whose last axis is contiguous

    def results(self, inputs: Mapping[str, Given], numbers: Numbers) -> dict[str, Written]:
        """What a call on these writes, by name; UsageError for inputs that do not fit each other."""
        known: dict[str, Any] = {}
        owners: dict[str, str] = {}  # the input that a letter's length comes from
        for name, x in inputs.items():
            self.check_place(name, x.data)
            if x.scale is not None and x.form is not None and x.scale.shape != scale_shape(x.shape, x.form):
                raise UsageError(
                    f"{self.name}: the scale of {name} is {x.scale.shape}, not {scale_shape(x.shape, x.form)}"
                )
            for letter, length in self._bound(name, x.shape):
                owner = owners.setdefault(letter, name)
                if known.setdefault(letter, length) != length:
                    other = f"{owner} {inputs[owner].shape}, {shown(self.inputs[owner])}"
                    raise UsageError(f"{self.name}: {name} {x.shape}, {shown(self.inputs[name])}, does not fit {other}")
        for letter, length in self.lengths(known, numbers).items():
            if known.setdefault(letter, length) != length:
                name = owners[letter]
                raise UsageError(
                    f"{self.name}: {name} is {inputs[name].shape}, and {length} would fit, not {known[letter]}"
                )
        dtype = self._dtype(inputs)
        return {name: _result(axes, known, dtype) for name, axes in self.outputs.items()}

    def check_place(self, name: str, x: Operand) -> None:
        """UsageError for memory that is not laid out as the routine takes it."""
        is_view = x.strides is not None and self.takes_views and x.strides[-1] == DTYPES[x.dtype].itemsize
        if x.strides is not None and not is_view:
            raise UsageError(f"{self.name}: {name} {x.shape} is not contiguous: copy it first")
        if not math.prod(x.shape):
            raise UsageError(f"{self.name}: {name} {x.shape} has no elements")

    def _bound(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
        """The letters of an input, with their lengths."""
        leads, letters, _ = parsed(self.inputs[name])
        first = len(shape) - len(letters)
        if first < 0 or (first and not leads):
            raise UsageError(f"{self.name}: {name} {shape} is not {shown(self.inputs[name])}")
        if leads:
            yield "...", shape[:first]
        yield from zip(letters, shape[first:], strict=True)

    def _dtype(self, inputs: Mapping[str, Given]) -> str:
        """That of the values; UsageError where they have many, or where another operand has a wrong one."""
        first = next(name for name in inputs if not parsed(self.inputs[name])[2])
        dtype = inputs[first].dtype
        if dtype not in VALUES:
            raise UsageError(f"{self.name}: {first} is in {dtype}: use {', '.join(VALUES)}")
        for name, x in inputs.items():
            wanted = _dtypes(parsed(self.inputs[name])[2], dtype)
            if x.dtype not in wanted:
                raise UsageError(f"{self.name}: {name} is in {x.dtype}, not {wanted[0]}, where {first} is in {dtype}")
        return dtype


def single(op: str, name: str, outputs: Mapping[str, str], inputs: Mapping[str, str], **more: Any) -> Routine:
    """The routine of one op, whose operands these are."""
    about = record(op)
    assert (about.outputs, set(about.inputs)) == (tuple(outputs), set(inputs)), op
    return Routine(name, outputs, inputs, lambda operands: operands.run(op), **more)


@cache
def parsed(axes: str) -> tuple[bool, str, str]:
    """Whether any axes lead, the letters after them, and the word that says the dtype."""
    letters, _, kind = axes.partition(" ")
    return letters.startswith("..."), letters.removeprefix("..."), kind


def shown(axes: str) -> str:
    """Axes as a user reads them."""
    leads, letters, _ = parsed(axes)
    names = [*(["..."] if leads else []), *letters]
    return f"({', '.join(names)}{',' * (len(names) == 1)})"


def _dtypes(kind: str, values: str) -> tuple[str, ...]:
    wide = values if values == "fp64" else "fp32"
    return {"": (values,), "stat": (wide,), "int": ("int32",), "grad": (values, wide)}[kind]


def _result(axes: str, known: Mapping[str, Any], dtype: str) -> Written:
    leads, letters, kind = parsed(axes)
    return Written((*(known["..."] if leads else ()), *(known[x] for x in letters)), _dtypes(kind, dtype))
