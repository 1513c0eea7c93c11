"""What an op gets: a Tensor for each operand that it reads, an Output for each that it writes.

A backend sees only these two. How values become the bytes of a form is defined here, in NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from llmq.few_bits import ENCODED, LEVELS, unpacked
from llmq.tensor import COLSUM_ROWS, DTYPES, LIMITS, Form

SLICE = 1 << 16  # elements per slice: bounds the temporaries of a large value, and keeps them in the L2 cache


@dataclass(eq=False)
class Tensor:
    """Bytes that an op reads: `array` has the stored shape, `shape` is the logical one. `scale`, which dequantises, is
    (1,) or, where the copy owns its scales, of `scale_shape`."""

    name: str
    array: np.ndarray
    shape: tuple[int, ...]
    form: Form | None = None
    scale: np.ndarray | None = None

    def read(self) -> np.ndarray:
        """The logical tensor in f32 (f64 if stored so; integers as they are), dequantised; (parts, N) for colsum.

        May be a view of the storage: an op computes everything before it writes anything.
        """
        array, form, scale = self.array, self.form, self.scale
        if form is not None and form.dtype in LEVELS:
            array = unpacked(array, form.dtype)
        elif array.dtype.kind not in "iu" and array.dtype not in (np.float32, np.float64):
            array = array.astype(np.float32)
        if scale is not None:
            array = array * (form.scales.spread(scale, array.shape) if form and form.scaling else scale)
        if form is not None and form.layout == "col":
            array = array.T.reshape(self.shape)
        return array

    def read_rows(self, index: np.ndarray) -> np.ndarray:
        """Rows `index` (any shape) along the first axis, as `read` gives them, without reading the others."""
        assert self.form is None or not self.form.owns_scales, f"{self.name}: a row of {self.form} has no scale alone"
        rows = (self.array.T if self.form is not None and self.form.layout == "col" else self.array)[index]
        return Tensor(self.name, rows, rows.shape, scale=self.scale).read()

    def chunk(self, start: int, count: int) -> Tensor:
        """Rows [start, start + count) of this tensor seen as (rows, last axis), over the same bytes."""
        shape, scale = (count, self.shape[-1]), self.scale
        if self.form is not None and scale is not None:
            scale = scales_of_rows(scale, self.form, start, count)
        if self.form is not None and self.form.layout == "col":
            return replace(self, array=self.array[:, start : start + count], shape=shape, scale=scale)
        assert self.form is None or self.form.layout == "row", "column sums cover a fixed number of rows"
        rows = self.array.reshape(-1, self.array.shape[-1])
        return replace(self, array=rows[start : start + count], shape=shape, scale=scale)


@dataclass(eq=False)
class Output:
    """Bytes that an op writes: one Tensor per wanted form, none if the result is not read.

    `dtype` is the slot's: every form is made from the value rounded to it. With `accumulate` the value is added to
    what is there. `amax` (1,) collects the largest magnitude for delayed scaling, where statistics are wanted.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tensors: tuple[Tensor, ...]
    accumulate: bool = False
    amax: dict[str, np.ndarray] = field(default_factory=dict)  # by the dtype of the quantized form

    @property
    def wanted(self) -> bool:
        """Whether the result is read; an op skips the work of an unwanted output."""
        return bool(self.tensors)

    def write(self, value: np.ndarray) -> None:
        """Rounds `value` (logical shape, f32 or f64) to the slot's dtype and stores every wanted form.

        In slices of rows where none depends on another, so that the temporaries of a large value stay small.
        """
        if not self.tensors:
            return
        if value.size > SLICE and self.in_rows and value.flags.c_contiguous:
            rows = value.reshape(-1, value.shape[-1])
            for start, count in slices(value.shape):
                self.chunk(start, count)._write(rows[start : start + count])
        else:
            self._write(value)

    @property
    def in_rows(self) -> bool:
        """Whether every form can be written row by row: none sums over rows or owns scales."""
        return all(in_rows(target.form) for target in self.tensors)

    def _write(self, value: np.ndarray) -> None:
        if self.accumulate:
            (target,) = self.tensors
            value = target.read() + value
        rounded = round_to(value, self.dtype)
        wide = rounded if rounded.dtype in (np.float32, np.float64) else None
        for target in self.tensors:
            if target.form is None:
                target.array[...] = rounded.reshape(target.array.shape)
                continue
            if wide is None:
                wide = rounded if rounded.dtype.kind in "iu" else rounded.astype(np.float32)
            if target.form.owns_scales:
                assert target.scale is not None
                target.scale[...] = own_scales(wide, target.form)
            target.array[...] = to_form(wide, target.form, target.scale)
        for cell in self.amax.values():
            assert wide is not None
            cell[...] = np.maximum(cell, np.abs(wide).max(initial=0.0))

    def write_rows(self, index: np.ndarray, values: np.ndarray) -> None:
        """Writes a value that is `values` (n, ...) at the distinct rows `index` (n,) and zero elsewhere.

        What `write` of the dense value would store, for a plain output, touching only those rows when accumulating.
        """
        (target,) = self.tensors
        assert target.form is None and not self.amax
        if self.accumulate:
            values = target.read_rows(index) + values
        else:
            target.array[...] = 0
        target.array[index] = round_to(values, self.dtype)

    def chunk(self, start: int, count: int) -> Output:
        """Rows [start, start + count) of this output seen as (rows, last axis), over the same bytes."""
        tensors = tuple(target.chunk(start, count) for target in self.tensors)
        return replace(self, shape=(count, self.shape[-1]), tensors=tensors)


def in_rows(form: Form | None) -> bool:
    """Whether a row of a tensor in `form` depends on this row alone."""
    return form is None or not (form.owns_scales or form.layout == "colsum")


def slices(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(start, count) of whole rows, of about SLICE elements, over the flattened leading axes of `shape`."""
    num_rows = math.prod(shape[:-1])
    step = max(1, SLICE // shape[-1])
    for start in range(0, num_rows, step):
        yield start, min(step, num_rows - start)


def round_to(value: np.ndarray, dtype: str) -> np.ndarray:
    """`value` rounded to nearest even in the storage type `dtype` (no saturation: bf16 overflows to infinity)."""
    return np.asarray(value).astype(DTYPES[dtype], copy=False)


def to_form(value: np.ndarray, form: Form, scale: np.ndarray | None) -> np.ndarray:
    """`value` (f32, already rounded to its slot's dtype) as the bytes of `form`, in the stored shape.

    A scaled copy is sat(value * (1 / scale)) rounded to nearest even, with one f32 reciprocal per scale; values beyond
    the format saturate at its largest finite number, and NaN stays NaN.
    """
    columns = value.shape[-1]
    if form.layout == "colsum":
        starts = np.arange(0, value.size // columns, COLSUM_ROWS)
        return np.add.reduceat(value.reshape(-1, columns), starts, axis=0)
    if form.layout == "col":
        value = value.reshape(-1, columns).T
    if form.dtype in LIMITS:
        assert scale is not None
        limit = np.float32(LIMITS[form.dtype])
        inverse = np.float32(1) / scale if form.scaling is None else form.scales.inverse(scale, value.shape)
        value = np.clip(value * inverse, -limit, limit)
    return ENCODED[form.dtype](value) if form.dtype in ENCODED else value.astype(DTYPES[form.dtype])


def own_scales(value: np.ndarray, form: Form) -> np.ndarray:
    """Scales of a copy of `value` (f32) that owns them, of the largest of the numbers under each."""
    size = np.abs(value.reshape(-1, value.shape[-1]))
    amax = form.scales.amax(size.T if form.layout == "col" else size)
    return form.scales.made(amax, LIMITS[form.dtype])


def scales_of_rows(scale: np.ndarray, form: Form, start: int, count: int) -> np.ndarray:
    """Of the scales of a copy, those of rows [start, start + count) of the logical tensor, where they lie together."""
    cut = form.scales.of_columns if form.layout == "col" else form.scales.of_rows
    found = cut(scale, start, count)
    assert found is not None, f"rows {start} to {start + count} in {form} have no scales that lie together"
    return found


def scales_of_columns(scale: np.ndarray, form: Form, start: int, count: int) -> np.ndarray:
    """Of the scales of a copy, those of columns [start, start + count) of the logical tensor: rows of its transpose."""
    return scales_of_rows(scale, replace(form, layout="col" if form.layout == "row" else "row"), start, count)
