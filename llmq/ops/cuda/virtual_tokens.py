"""Virtual tokens on the GPU; see cuda/virtual_tokens.cu."""

from __future__ import annotations

import math

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants
from llmq.ops.seam import Arguments

THREADS = 128  # virtual_tokens.cu


def virtual_tokens_forward(
    out: Output, /, x: Tensor, virtual: Tensor, positions: Tensor, *, num_virtual: int, channels: int
) -> None:
    """out (B,T,W) <- x (B,T,W), virtual (N,D) of the same dtype, positions (B,T) int32."""
    assert gpu.type_of(virtual) == gpu.type_of(x) and virtual.shape == (num_virtual, channels)
    _replace(out, x, virtual, positions, num_virtual, channels)


def virtual_tokens_backward(
    d_x: Output, d_virtual: Output, /, d_out: Tensor, positions: Tensor, *, num_virtual: int, channels: int
) -> None:
    """d_x (B,T,W), d_virtual (N,D) <- d_out (B,T,W), positions (B,T) int32."""
    if d_virtual.wanted:
        _refuse_many(num_virtual)
        constants = _constants(d_out, num_virtual, channels, G=gpu.type_of(d_virtual))
        number = int(constants["N"])
        arguments = (d_virtual, d_out, positions, np.int32(gpu.rows_of(d_out.shape)))
        grid = (-(-channels // (THREADS * number)), num_virtual)
        gpu.launch("virtual_tokens", "virtual_tokens_sum", grid, THREADS, (*arguments, gpu.adds(d_virtual)), constants)
    _replace(d_x, d_out, None, positions, num_virtual, channels)


def _replace(out: Output, x: Tensor, matrix: Tensor | None, positions: Tensor, num_virtual: int, channels: int) -> None:
    """Rows of the matrix, or zeros, in place of virtual tokens."""
    if not out.wanted:
        return
    assert gpu.type_of(out) == gpu.type_of(x)
    rows, is_in_place = gpu.rows_of(x.shape), gpu.plain(out) == gpu.pointer(x)
    constants = _constants(x, num_virtual, channels, IN_PLACE=int(is_in_place))
    arguments = (out, x, matrix, positions, np.int32(rows))
    gpu.launch("virtual_tokens", "virtual_tokens", -(-rows * 32 // THREADS), THREADS, arguments, constants)


def _constants(x: Tensor, num_virtual: int, channels: int, **others: int | str) -> Constants:
    kind, width = gpu.type_of(x), x.shape[-1]
    number = gpu.access(math.gcd(width, channels), kind)
    sizes = {"W": width, "CHANNELS": channels, "VIRTUAL": num_virtual, "N": number}
    return {"T": kind, "G": "float", "IN_PLACE": 0, **sizes, **others}


def _refuse_many(num_virtual: int) -> None:
    """UsageError for more virtual tokens than one launch takes."""
    if num_virtual > gpu.GRID_SIDE:
        raise UsageError(
            f"{num_virtual} virtual tokens are more than the {gpu.GRID_SIDE} that the GPU takes: use fewer"
        )


def _refuse(call: Arguments, capability: int) -> None:
    _refuse_many(call.numbers["num_virtual"])


KERNELS = (gpu.Kernel(virtual_tokens_forward), gpu.Kernel(virtual_tokens_backward, refuse=_refuse))
