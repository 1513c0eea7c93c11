"""Frozen rows that are held in a form: made of the source's values while loading, and read back.

Both go by slices of matrix rows that one tile's scale covers, so that a large row is never there in f32 as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmq.scaling import BLOCK, scale_from
from llmq.tensor import DTYPES, LARGEST, Output, Ref, Tensor, round_to, scale_shape


def held_copy(ref: Ref, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes and the scales of `value` (N,K), of any float dtype, in the form of `ref`."""
    form = ref.form
    assert form is not None
    scale = np.empty(scale_shape(ref.shape, form), np.float32)
    copy = Tensor(ref.name, np.empty(ref.shape, DTYPES[form.dtype]), ref.shape, form, scale)
    if form.is_measured:
        largest = [np.abs(part).max(initial=0) for _, part in _slices(value, ref.dtype)]
        amax = np.array([max(largest)], np.float32)
        scale[...] = scale_from(amax, np.float32(LARGEST[form.dtype]), np.float32(1))
    for start, part in _slices(value, ref.dtype):
        Output(ref.name, ref.shape, ref.dtype, (copy,)).chunk(start, len(part)).write(part)
    return copy.array, scale


def held_value(copy: Tensor, dtype: str) -> np.ndarray:
    """What a held copy stands for, in `dtype`."""
    value = np.empty(copy.shape, DTYPES[dtype])
    for start in range(0, copy.shape[0], BLOCK):
        value[start : start + BLOCK] = copy.chunk(start, min(BLOCK, copy.shape[0] - start)).read()
    return value


def _slices(value: np.ndarray, dtype: str) -> Iterator[tuple[int, np.ndarray]]:
    """Slices of matrix rows, rounded to `dtype`, in f32, each with its first row."""
    for start in range(0, len(value), BLOCK):
        yield start, round_to(value[start : start + BLOCK], dtype).astype(np.float32)
