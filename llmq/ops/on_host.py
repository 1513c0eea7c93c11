"""Routines on arrays of the host: the reference ops, on the callers' own memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.ops.reference import OPS
from llmq.tensor import DTYPES


def on(device: None) -> AbstractContextManager[None]:
    """Within, calls are of this device."""
    return nullcontext()


def layout(read: Sequence[np.ndarray], written: Sequence[np.ndarray]) -> None:
    """What `bind` depends on beside shapes: nothing."""


def bind(
    compute: Callable[..., None], layout: None
) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray], Any], None]:
    """A function of the arrays of inputs (the scales of a copy after it) and of the results that are wanted."""

    def run(read: Sequence[np.ndarray], written: Sequence[np.ndarray], allocate: Any) -> None:
        if not all(x.flags.writeable for x in written):
            raise UsageError("out is read-only: give memory that may be written")
        # an op may write in slices of rows, which a view need not have
        own = [x if x.flags.c_contiguous else np.empty(x.shape, x.dtype) for x in written]
        arrays = iter((*read, *own))
        with np.errstate(all="ignore"):
            compute(
                OPS,
                lambda shape, dtype, strides: next(arrays).view(DTYPES[dtype]),
                lambda shape, dtype: np.empty(shape, DTYPES[dtype]),
            )
        for x, array in zip(written, own, strict=True):
            if x is not array:
                x[...] = array

    return run
