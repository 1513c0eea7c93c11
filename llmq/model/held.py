"""Frozen rows that are held in a form: which one, made of the source's values while loading, and read back.

The last two go by slices of matrix rows that one tile's scale covers, so that a large row is never there in f32 as a
whole. Slices are made at the same time, on all cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from llmq.errors import UsageError
from llmq.few_bits import NESTED_BLOCK, NF4_BLOCK, nf4_blocks, unpacked
from llmq.hardware.blas import num_cores
from llmq.row import Row
from llmq.scaling import BLOCK, Nested, scale_from
from llmq.tensor import DTYPES, LARGEST, Form, Output, Ref, Tensor, round_to, scale_shape, stored_shape

Made = TypeVar("Made")


def is_layer_weight(row: Row) -> bool:
    """Whether a row is the weight of a layer's linear map, which a quantized base has in few bits."""
    return row.layer is not None and row.site is not None and len(row.shape) == 2 and row.file == "model"


def held_form(base: str, row: Row, *, single: bool = False) -> Form:
    """The form of a frozen weight for --base-dtype; of e4m3 with a `single` scale or one for each tile. UsageError."""
    return HELD_FORMS[base](row, single)


def _nf4(row: Row, single: bool) -> Form:
    sizes = {part.name: (part.stop - part.start) * row.shape[1] for part in row.parts}
    if odd := [f"{name} has {size}" for name, size in sizes.items() if size % NF4_BLOCK]:
        raise UsageError(f"--base-dtype nf4 takes numbers in blocks of {NF4_BLOCK}, and {odd[0]}: use int8 or mxfp4")
    borders = [part.start * row.shape[1] // NF4_BLOCK for part in row.parts]
    return Form("nf4", "row", f"nested{math.gcd(NESTED_BLOCK, *borders)}")


# int8 has one scale for a row, as LLM.int8() (Dettmers et al., 2022)
HELD_FORMS: dict[str, Callable[[Row, bool], Form]] = {
    "e4m3": lambda row, single: Form("e4m3", "row", "current" if single else "tilewise"),
    "int8": lambda row, single: Form("int8", "row", "rowwise"),
    "nf4": _nf4,
    "mxfp4": lambda row, single: Form("mxfp4", "row", "exponents"),
}


def held_copy(ref: Ref, value: np.ndarray, borders: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
    """The bytes and the scales of `value` (N,K), of any float dtype, in the form of `ref`.

    It is made of the tensors whose rows end at `borders`; none: of one.
    """
    form = ref.form
    assert form is not None
    numbers = np.empty(stored_shape(ref.shape, form), DTYPES[form.dtype])

    def rows(start: int) -> np.ndarray:
        return round_to(value[start : start + BLOCK], ref.dtype).astype(np.float32)

    if isinstance(form.scales, Nested):

        def absmax(start: int) -> np.ndarray:
            part = rows(start)
            codes, found = nf4_blocks(part)
            numbers[start : start + BLOCK] = codes.reshape(len(part), -1)
            return found

        blocks = np.concatenate(_of_slices(len(value), absmax))
        ends = [stop * ref.shape[1] // NF4_BLOCK for stop in borders or ref.shape[:1]]
        return numbers, form.scales.stored(blocks, [0, *ends])
    scale = np.empty(scale_shape(ref.shape, form), DTYPES[form.scales.dtype])
    copy = Tensor(ref.name, numbers, ref.shape, form, scale)
    if form.is_measured:
        amax = max(_of_slices(len(value), lambda start: np.abs(rows(start)).max(initial=0)))
        scale[...] = scale_from(np.array([amax], np.float32), np.float32(LARGEST[form.dtype]), np.float32(1))

    def write(start: int) -> None:
        part = rows(start)
        Output(ref.name, ref.shape, ref.dtype, (copy,)).chunk(start, len(part)).write(part)

    _of_slices(len(value), write)
    return numbers, scale


def held_value(copy: Tensor, dtype: str) -> np.ndarray:
    """What a held copy stands for, in `dtype`."""
    value = np.empty(copy.shape, DTYPES[dtype])
    absmax = _absmax(copy)

    def read(start: int) -> None:
        value[start : start + BLOCK] = _values(copy, absmax, start)

    _of_slices(len(value), read)
    return value


def as_held(row: Row, value: np.ndarray, base: str | None) -> np.ndarray:
    """What a run in bf16 on --base-dtype `base` reads of a row; None: the value itself."""
    if base is None or not is_layer_weight(row):
        return value
    ref = Ref(row.name, "weight", row.shape, "bf16", row.layer, form=held_form(base, row))
    numbers, scale = held_copy(ref, value, [part.stop for part in row.parts])
    return held_value(Tensor(row.name, numbers, row.shape, ref.form, scale), ref.dtype)


def single_scale(copy: Tensor, dtype: str, fp8: str) -> np.ndarray:
    """(1,) f32: the scale of an `fp8` copy of what a held copy stands for in `dtype`, as `amax_scale` measures it."""
    absmax = _absmax(copy)

    def largest(start: int) -> np.ndarray:
        return np.abs(_values(copy, absmax, start)).max(initial=0)

    amax = round_to(np.array([max(_of_slices(copy.shape[0], largest))], np.float32), dtype).astype(np.float32)
    return scale_from(amax, np.float32(LARGEST[fp8]), np.float32(1))


def _absmax(copy: Tensor) -> np.ndarray | None:
    """The scales of blocks, where they are nested; None elsewhere."""
    assert copy.form is not None and copy.scale is not None
    scales = copy.form.scales
    return scales.absmax(copy.scale, copy.array.size * 2 // NF4_BLOCK) if isinstance(scales, Nested) else None


def _values(copy: Tensor, absmax: np.ndarray | None, start: int) -> np.ndarray:
    """What the slice of a held copy from row `start` on stands for, in f32."""
    count, width = min(BLOCK, copy.shape[0] - start), copy.shape[1]
    if absmax is None:
        return copy.chunk(start, count).read()
    blocks = unpacked(copy.array[start : start + count], "nf4").reshape(-1, NF4_BLOCK)
    first = start * width // NF4_BLOCK
    return (blocks * absmax[first : first + len(blocks), None]).reshape(count, width)


def _of_slices(num_rows: int, work: Callable[[int], Made]) -> list[Made]:
    """What `work` makes of each slice of matrix rows, by its first row."""
    starts = range(0, num_rows, BLOCK)
    if len(starts) == 1:
        return [work(0)]
    with ThreadPoolExecutor(min(len(starts), num_cores())) as pool:
        return list(pool.map(work, starts))
