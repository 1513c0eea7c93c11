"""What a reference op takes beside its arguments: NumPy's temporaries, so that a plan on the CPU counts them.

An op's record says in `temporaries` what lives at its fullest line, in arrays as large as one of its operands. A narrow
or scaled operand is read into a copy of its own, and counts as one more. What ops and `Output.write` do in slices of
rows costs the same few slices whatever the sizes. tests/ops/test_temporaries.py holds all of this against what NumPy
asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmq.operands import SLICE, in_rows
from llmq.ops.seam import record
from llmq.tensor import DTYPES, Ref, stored_dtype

if TYPE_CHECKING:
    from llmq.ops.record import Call, Result

SLICES = 12  # that the optimizer holds at once, the most of all; random bits are among them


@dataclass(frozen=True)
class Temporaries:
    """The bytes of what NumPy makes of a call's arguments, which are here by name, absent ones left out."""

    outputs: Mapping[str, Result]
    inputs: Mapping[str, Ref]
    numbers: Mapping[str, Any]

    @property
    def width(self) -> int:
        """Bytes of a number as ops compute with it: f64 in runs that are wholly in it, else f32."""
        refs = [*(result.ref for result in self.outputs.values()), *self.inputs.values()]
        return 8 if any(ref.dtype == "fp64" for ref in refs) else 4

    def size(self, name: str) -> int:
        """Bytes of an operand as ops compute with it; 0 for one that is absent."""
        ref = self.outputs[name].ref if name in self.outputs else self.inputs.get(name)
        return 0 if ref is None else self.width * math.prod(ref.shape)

    def copies(self, *names: str) -> int:
        """Bytes of the copies that reading makes; what is stored as ops compute with it is read in place."""
        return sum(self.size(name) for name in names if name in self.inputs and _is_copied(self.inputs[name]))

    def reading(self, *names: str) -> int:
        """Most bytes while these are read, one after the other: beside a scaled copy lies that of the bare numbers."""
        held = most = 0
        for name in names:
            held += self.copies(name)
            form = self.inputs[name].form if name in self.inputs else None
            if form is not None and form.scaling is not None:
                spread = form.scales.is_repeated  # then their scales, number by number, are there too
                most = max(most, held + self.size(name) * (2 if spread else 1))
        return max(most, held)

    def in_rows(self, name: str) -> bool:
        """Whether an operand can be read in slices of rows."""
        return in_rows(self.inputs[name].form)

    def writing(self, name: str) -> int:
        """Bytes that `Output.write` takes beside the value, where it cannot write in slices."""
        result = self.outputs.get(name)
        if result is None or all(map(in_rows, result.forms)):
            return 0
        # The value in the slot's dtype, the same in f32, and a scaled copy before and after it is clipped.
        narrow = 6 if DTYPES[result.ref.dtype].itemsize < 4 else 0
        scaled = 8 if any(form is not None and form.scaling is not None for form in result.forms) else 0
        return math.prod(result.ref.shape) * (narrow + scaled)


def _is_copied(ref: Ref) -> bool:
    dtype = stored_dtype(ref)
    is_scaled = ref.form is not None and ref.form.scaling is not None
    return is_scaled or (dtype.kind not in "iu" and dtype.itemsize < 4)


def product(value: str, *factors: str) -> Callable[[Temporaries], int]:
    """A matrix product: its factors are read, then there is the value, then what is added to it and what is written."""
    return lambda a: max(
        a.reading(*factors), a.size(value) + max(a.copies(*factors), a.reading("residual"), a.writing(value))
    )


def elementwise(value: str, arrays: float, *reads: str, held: float = 0.0) -> Callable[[Temporaries], int]:
    """`arrays` of the value's size at most, then the value and `held` more while it is written."""
    return lambda a: (
        a.copies(*reads) + max(int(arrays * a.size(value)), int((1 + held) * a.size(value)) + a.writing(value))
    )


def turn(value: str, read: str) -> Callable[[Temporaries], int]:
    """Products with cos and sin beside the turned heads; what was read is gone when the value is written."""
    return lambda a: max(a.copies(read) + 2 * a.size(value), a.size(value) + a.writing(value))


def if_whole(value: str, rule: Callable[[Temporaries], int]) -> Callable[[Temporaries], int]:
    """`rule` where the value cannot be made in slices."""
    return lambda a: rule(a) if a.writing(value) else 0


def temporary_bytes(call: Call) -> int:
    """Most bytes of NumPy's temporaries while a call runs."""
    about = record(call.op)
    outputs = {name: result for name, result in zip(about.outputs, call.outputs, strict=True) if result is not None}
    inputs = {name: ref for name, ref in zip(about.inputs, call.inputs, strict=True) if ref is not None}
    a = Temporaries(outputs, inputs, call.numbers)
    shapes = [*(result.ref.shape for result in outputs.values()), *(ref.shape for ref in inputs.values())]
    slices = SLICES * a.width * max(max(shape[-1], min(math.prod(shape), SLICE)) for shape in shapes if shape)
    return max(about.temporaries(a), slices)
