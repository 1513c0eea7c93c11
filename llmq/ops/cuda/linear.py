"""The linear map and its gradients on the GPU: row-major handles seen as the column-major problems of cuBLASLt.

All three are out (M,N) = left (M,K) right (N,K)^T, with a handle or its transpose in either place; row and col forms
only decide which axis lies innermost. In column-major terms out^T (N,M) = right left^T, so A is `right` and B `left`.
fp8 takes both with K innermost. Bias goes into the epilogue, a residual is C, and accumulation adds to D in place.
C may be D's own memory, as accumulation is; both have one layout. Operands and results that are columns of a wider
matrix have its width as leading dimension. Into bf16, some algorithms round before they add the bias and C, as separate
additions would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.cublaslt import ALIGNMENT, BYTES, WORKSPACE_BYTES, Gemm, Gemms, Matrix, Pointers
from llmq.ops.seam import record
from llmq.tensor import DTYPES, Form, Ref

SCALES = {"delayed": "tensor", "current": "tensor", "rowwise": "row", "blockwise": "block", "tilewise": "tile"}
NAMES = {DTYPES[name]: name for name in BYTES}
# op: (whether left and right are the transposes of the first and second input, whether fp8 may sum fast)
WAYS = {
    "linear_forward": (False, False, True),
    "linear_dgrad": (False, True, True),
    "linear_wgrad": (True, True, False),
}


def bias_backward(d_bias: Output, /, d_y: Tensor) -> None:
    """d_bias (N,) <- d_y (...,N) in colsum form: (parts,N) f32; see cuda/bias.cu."""
    assert d_y.form is not None and d_y.form.layout == "colsum", "the bias gradient is read as column sums"
    parts, columns = d_y.array.shape
    arguments = (d_bias, d_y, np.int32(parts), np.int32(columns), gpu.adds(d_bias))
    blocks = -(-columns // gpu.SUM_COLUMNS)
    gpu.launch("bias", "bias_backward", blocks, gpu.SUM_THREADS, arguments, {"G": gpu.type_of(d_bias)})


def linear_kernels(gemms: Gemms | None) -> dict[str, gpu.Kernel]:
    """The three ops on these products; None: to plan with, as the library may use as much scratch on every GPU."""
    run: Any = _run
    return {op: gpu.Kernel(partial(run, gemms, op), lambda call: WORKSPACE_BYTES) for op in WAYS}


def planned_problem(op: str, out: Ref, accumulate: bool, inputs: Sequence[Ref | None]) -> Gemm:
    """The problem that a planned call will pose, for `Gemms.prepare`: storages are aligned to 256 bytes."""
    given = dict(zip(record(op).inputs, inputs, strict=True))
    residual = given.get("residual")
    is_own = residual is not None and _place(residual) == _place(out)
    read = (*inputs[:2], given.get("bias"), None if is_own else residual)
    views = [None if ref is None else _View.of_ref(ref) for ref in read]
    return _problem(op, _View.of_ref(out), accumulate or is_own, views)


def _place(ref: Ref) -> tuple[Any, ...]:
    """Equal for two Refs of the same bytes."""
    return ref.space, ref.name, ref.again, ref.form, ref.view


@dataclass(frozen=True)
class _View:
    """A handle seen as a (rows, columns) matrix; `ld` elements between stored rows, which are columns in col form."""

    name: str
    dtype: str
    rows: int
    columns: int
    is_col: bool
    ld: int
    address: int
    scale: int  # address; 0 for none
    scaling: str | None  # a key of cublaslt.SCALES

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        """A handle over a CuPy array."""
        array: Any = tensor.array
        dtype = tensor.form.dtype if tensor.form is not None else NAMES.get(array.dtype, str(array.dtype))
        assert array.strides[-1] == array.itemsize, f"{tensor.name} is strided along its last axis"
        ld = array.strides[-2] // array.itemsize if array.ndim > 1 else array.size
        places = max(ld, array.shape[-1]), gpu.pointer(tensor), gpu.scale_of(tensor)
        return cls._make(tensor.name, dtype, tensor.shape, tensor.form, *places)

    @classmethod
    def of_ref(cls, ref: Ref) -> _View:
        """A planned tensor; addresses count from an aligned one."""
        dtype = ref.form.dtype if ref.form is not None else ref.dtype
        is_col = ref.form is not None and ref.form.layout == "col"
        scale = ALIGNMENT if ref.form is not None and ref.form.scaling else 0
        ld = math.prod(ref.whole[:-1]) if is_col else ref.width
        row, column = divmod(ref.start, ref.width)
        address = (column * ld + row if is_col else row * ld + column) * DTYPES[dtype].itemsize
        return cls._make(ref.name, dtype, ref.shape, ref.form, ld, address, scale)

    @classmethod
    def _make(
        cls, name: str, dtype: str, shape: tuple[int, ...], form: Form | None, ld: int, address: int, scale: int
    ) -> _View:
        if dtype not in BYTES:
            raise UsageError(f"{name} is stored in {dtype}, which has no matrix product on the GPU: use --device cpu")
        is_col = form is not None and form.layout == "col"
        scaling = SCALES[form.scaling] if form is not None and form.scaling is not None else None
        return cls(name, dtype, math.prod(shape[:-1]), shape[-1], is_col, ld, address, scale, scaling)

    def matrix(self, transposed: bool) -> Matrix:
        """As an operand."""
        return Matrix(self.dtype, self.ld, transposed, self.scaling)


def _run(
    gemms: Gemms, op: str, output: Output, /, *inputs: Tensor | None, alpha: float = 1.0, scratch: Any = None
) -> None:
    """Runs one of the three ops, whose inputs are those of the reference.

    What follows from its handles is worked out at their first call (50 us) and remembered with them.
    """
    given, run = gemms.bound.get(output, (None, None))
    if run is None or given != (inputs, alpha):
        named = dict(zip(record(op).inputs, inputs, strict=True))
        run = gemms.bind(*_pose(op, output, (*inputs[:2], named.get("bias"), named.get("residual"))), alpha)
        gemms.bound[output] = (inputs, alpha), run
    run(gpu.room(scratch, WORKSPACE_BYTES))


def _pose(op: str, output: Output, inputs: Sequence[Tensor | None]) -> tuple[Gemm, Pointers]:
    """A call's problem, and where its operands are."""
    (target,) = output.tensors
    assert target.form is None, f"{output.name}: a matrix product writes the value only, not {target.form}"
    out, views = _View.of(target), [None if tensor is None else _View.of(tensor) for tensor in inputs]
    left, right, bias, residual = views
    assert left is not None and right is not None
    place = out.address, out.dtype, out.ld
    is_own = residual is not None and (residual.address, residual.dtype, residual.ld) == place
    problem = _problem(op, out, output.accumulate or is_own, (left, right, bias, None if is_own else residual))
    assert not (output.accumulate and is_own), f"{op}: {out.name} is added to and has a residual"
    return problem, Pointers(
        a=right.address,
        b=left.address,
        c=residual.address if residual is not None else out.address,
        d=out.address,
        bias=bias.address if bias is not None else 0,
        scale_a=right.scale,
        scale_b=left.scale,
    )


def _problem(op: str, out: _View, accumulate: bool, inputs: Sequence[_View | None]) -> Gemm:
    left, right, bias, residual = inputs
    assert left is not None and right is not None
    left_flipped, right_flipped, fast = WAYS[op]
    summed = left.rows if left_flipped else left.columns
    assert summed == (right.rows if right_flipped else right.columns), f"{op}: {left} does not fit {right}"
    assert not (accumulate and residual is not None), f"{op}: {out.name} is added to and has a residual"
    assert residual is None or (residual.dtype, residual.ld) == (out.dtype, out.ld), f"{op}: residual unlike {out.name}"
    addresses = [view.address for view in (out, left, right, residual) if view is not None]
    lowest = reduce(or_, addresses, ALIGNMENT)
    # the summed axis lies innermost where col form and transposition agree: then A is stored transposed and B is not
    return Gemm(
        m=out.columns,
        n=out.rows,
        k=summed,
        a=right.matrix(right.is_col == right_flipped),
        b=left.matrix(left.is_col != left_flipped),
        d=Matrix(out.dtype, out.ld),
        bias=bias.dtype if bias is not None else None,
        c="same" if accumulate else "other" if residual is not None else None,
        fast=fast and left.scaling in ("tensor", "row"),  # 128-blocks are added up in f32, and have no fast mode
        alignment=lowest & -lowest,
    )
