"""Tensors and Outputs made from arrays, poisoned before they are written, and the finite-difference check."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmq.operands import Output, Tensor, own_scales, to_form
from llmq.ops import on_cuda
from llmq.ops.reference import OPS
from llmq.ops.seam import Arguments
from llmq.tensor import DTYPES, Form, scale_shape, stored_shape

NAN_BYTE = {"int32": 0x80, "uint8": 0x80}  # every float format here reads bytes of 0xff as NaN


def tensor(array: np.ndarray, dtype: str | None = None, form: Form | None = None, scale: float | None = None) -> Tensor:
    """`array` as an op reads it, in `dtype` (integers: int32) or in `form` with a scale, or with the form's own."""
    array = np.asarray(array)
    if array.dtype.kind in "iu":
        dtype = "int32"
    value = array.astype(DTYPES[dtype]) if dtype else array.copy()
    cell = None if scale is None else np.array([scale], np.float32)
    if form is not None and form.owns_scales:
        cell = np.ascontiguousarray(own_scales(value.astype(np.float32), form))
    if form is not None:
        value = to_form(value if form.dtype == "fp64" else value.astype(np.float32), form, cell)
    return Tensor("in", np.ascontiguousarray(value), array.shape, form, cell)


def poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Memory full of NaN (integers: of a large negative number)."""
    raw = np.full((*shape, DTYPES[dtype].itemsize), NAN_BYTE.get(dtype, 0xFF), np.uint8)
    return raw.view(DTYPES[dtype])[..., 0]


def output(
    shape: tuple[int, ...],
    dtype: str,
    forms: Sequence[Form | None] = (None,),
    *,
    scale: float = 1.0,
    start: np.ndarray | None = None,
    amax: float | None = None,
) -> Output:
    """A poisoned output with `forms` (none: unwanted); it accumulates to `start`, and `amax` is its cell so far."""
    targets = []
    for form in forms:
        stored = poisoned(stored_shape(shape, form), form.dtype if form else dtype)
        cell = np.array([scale], np.float32) if form and form.scaling else None
        if form is not None and form.owns_scales:
            cell = poisoned(scale_shape(shape, form), "fp32")
        targets.append(Tensor("out", stored, shape, form, cell))
    if start is not None:
        targets[0].array[...] = start
    cells = {} if amax is None else {"e4m3": np.array([amax], np.float32)}
    return Output("out", shape, dtype, tuple(targets), accumulate=start is not None, amax=cells)


def arguments_of(op: str, *handles: Output | Tensor | None, **numbers: Any) -> Arguments:
    """The arguments of a call on handles, in the order of its signature, as if it were planned."""
    return on_cuda.arguments_of(op, handles, numbers)


def run(
    op: str,
    outputs: Sequence[tuple[int, ...] | Output],
    *inputs: np.ndarray | Tensor | None,
    dtype: str = "fp64",
    **numbers: object,
) -> list[np.ndarray]:
    """Runs `op` on arrays stored in `dtype`, into fresh outputs of the given shapes; what each output then holds."""
    written = [o if isinstance(o, Output) else output(o, dtype) for o in outputs]
    read = [x if x is None or isinstance(x, Tensor) else tensor(x, dtype) for x in inputs]
    OPS[op](*written, *read, **numbers)
    return [o.tensors[0].array if o.tensors else np.empty(0) for o in written]


def check_gradient(
    loss: Callable[..., float], inputs: Sequence[np.ndarray], gradients: Sequence[np.ndarray], size: float
) -> None:
    """Asserts that `gradients` of `loss(*inputs)` agree with central differences, one input at a time, in f64.

    Along u, D(h) = (loss(x + h u) - loss(x - h u)) / 2h = g u + c h^2 + O(h^4), so D(h/2) errs by a third of
    |D(h) - D(h/2)|, up to O(h^4): that difference whole is the bound's first term. The second is rounding: `size`
    bounds the sum of magnitudes of what the loss adds up, each right to 100 units of 2^-53.
    """
    rng = np.random.default_rng(7)
    h = 1e-4
    for n, gradient in enumerate(gradients):
        assert gradient.shape == inputs[n].shape
        for _ in range(2):
            direction = rng.standard_normal(inputs[n].shape)

            def slope(h: float, n: int = n, direction: np.ndarray = direction) -> float:
                moved = [[x + s * h * direction if i == n else x for i, x in enumerate(inputs)] for s in (1, -1)]
                return (loss(*moved[0]) - loss(*moved[1])) / (2 * h)

            wide, narrow = slope(h), slope(h / 2)
            bound = abs(wide - narrow) + 2 * 100 * 2**-53 * size / h
            assert bound < 1e-4 * np.linalg.norm(gradient), f"input {n}: the bound {bound} would hide an error"
            assert abs(narrow - np.sum(gradient * direction)) <= bound, f"input {n}"
