"""Routines on arrays of the host: the reference ops, on the callers' own memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Tensor
from llmq.ops.reference import OPS
from llmq.ops.routines import Given, Numbers, Operands, Routine, Written, output
from llmq.tensor import DTYPES, Form, scale_shape, stored_shape


def make(shape: tuple[int, ...], dtype: str, form: Form | None = None) -> Tensor:
    """Memory of a call."""
    array = np.empty(stored_shape(shape, form), DTYPES[form.dtype if form else dtype])
    scale = None
    if form is not None and form.scaling is not None:
        scale = np.empty(scale_shape(shape, form), DTYPES[form.scales.dtype])
    return Tensor("made", array, shape, form, scale)


def on(device: None) -> AbstractContextManager[None]:
    """Within, calls are of this device."""
    return nullcontext()


def layout(read: Sequence[np.ndarray], written: Sequence[np.ndarray]) -> str:
    """What `bind` depends on beside shapes: nothing."""
    return ""


def bind(
    routine: Routine, inputs: Mapping[str, Given], results: Mapping[str, Written | None], numbers: Numbers, layout: str
) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray], Any], None]:
    """A function of the arrays of inputs (the scales of a copy after it) and of the results that are wanted."""

    def run(read: Sequence[np.ndarray], written: Sequence[np.ndarray], allocate: Any) -> None:
        places = iter(read)
        given: dict[str, Tensor | None] = dict.fromkeys(routine.inputs)
        for name, x in inputs.items():
            array = next(places) if x.form is None else next(places).view(DTYPES[x.form.dtype])
            given[name] = Tensor(name, array, x.shape, x.form, next(places) if x.scale else None)
        if not all(x.flags.writeable for x in written):
            raise UsageError(f"{routine.name}: out is read-only: give memory that may be written")
        targets = dict(zip((name for name, result in results.items() if result), written, strict=True))
        # an op may write in slices of rows, which a view need not have
        own = {name: x if x.flags.c_contiguous else np.empty(x.shape, x.dtype) for name, x in targets.items()}
        outputs = {name: output(name, own.get(name), result) for name, result in results.items()}
        with np.errstate(all="ignore"):
            routine.compute(Operands(OPS, make, outputs, given, numbers, dtype))
        for name, array in targets.items():
            if own[name] is not array:
                array[...] = own[name]

    dtype = next(iter(inputs.values())).dtype
    return run
