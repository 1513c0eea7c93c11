"""A gain for each column on the GPU; see cuda/scale_columns.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants

FORWARD_ROWS = 32  # scale_columns.cu


def scale_columns_forward(y: Output, /, x: Tensor, gain: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """y (...,N) <- x (...,N), gain (N,) f32, bias (N,) or None, residual (...,N) or None: gain x + bias + residual."""
    if not y.wanted:
        return
    kind, columns, rows = gpu.type_of(y), x.shape[-1], gpu.rows_of(x.shape)
    assert all(gpu.type_of(tensor) == kind for tensor in (x, bias, residual) if tensor is not None)
    assert gpu.type_of(gain) == "float", "a gain is held in f32"
    arguments = (y, x, gain, bias, residual, np.int64(rows))
    constants, across = _constants(kind, columns)
    blocks = across * -(-rows // FORWARD_ROWS)
    gpu.launch("scale_columns", "scale_columns_forward", blocks, gpu.TILE_THREADS, arguments, constants)


def scale_columns_backward(
    d_x: Output, d_gain: Output, /, d_y: Tensor, x: Tensor, gain: Tensor, *, scratch: Any = None
) -> None:
    """d_x (...,N), d_gain (N,) <- d_y (...,N), x (...,N), gain (N,) f32."""
    if not d_x.wanted and not d_gain.wanted:
        return
    kind, columns, rows = gpu.type_of(d_y), x.shape[-1], gpu.rows_of(x.shape)
    assert gpu.type_of(x) == kind == gpu.type_of(d_x), "activations have one dtype"
    assert gpu.type_of(gain) == "float", "a gain is held in f32"
    wanted, outputs = gpu.forms(d_x)
    parts = -(-rows // gpu.SUMS_ROWS)
    partial = gpu.room(scratch, parts * columns * 4) if d_gain.wanted else 0
    constants, across = _constants(kind, columns, **wanted)
    arguments = (*outputs, partial, d_y, x, gain, np.int64(rows))
    gpu.launch("scale_columns", "scale_columns_backward", across * parts, gpu.TILE_THREADS, arguments, constants)
    if d_gain.wanted:
        summed = (d_gain, partial, np.int32(parts), np.int32(columns), gpu.adds(d_gain))
        named: Constants = {"T": "float", "G": gpu.type_of(d_gain), "C": 4, "N": 4, "FORMS": 0, "E4M3": 0}
        gpu.launch("scale_columns", "scale_columns_sum", -(-columns // gpu.SUM_COLUMNS), gpu.SUM_THREADS, summed, named)


def _constants(kind: str, columns: int, **wanted: int | str) -> tuple[Constants, int]:
    """Constants of a kernel, and blocks side by side."""
    number = gpu.access(columns, kind)
    across = -(-columns // (128 if number > 4 else 32 * number))
    return {"T": kind, "G": "float", "C": columns, "N": number, "FORMS": 0, "E4M3": 0, **wanted}, across


def _scratch_bytes(rows: int, columns: int) -> int:
    return -(-rows // gpu.SUMS_ROWS) * columns * 4


KERNELS = (
    gpu.Kernel(scale_columns_forward),
    gpu.Kernel(
        scale_columns_backward,
        lambda call: _scratch_bytes(gpu.rows_of(call.reads["x"].shape), call.reads["x"].shape[-1]),
    ),
)
