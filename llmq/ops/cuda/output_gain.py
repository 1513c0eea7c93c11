"""Magnitudes of adapters on the GPU; see cuda/output_gain.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants

THREADS = 256  # output_gain.cu


def output_gain(gain: Output, norm: Output, /, *read: Any, scale: float, first: int) -> None:
    """gain (N,), norm (N,) <- weight (N,K), through (N,S), gram (S,S), up (N,R), magnitude (N,), or None."""
    if not gain.wanted and not norm.wanted:
        return
    weight, through, gram, up, magnitude = read
    (rows,), kind = gain.shape, "float" if weight is None else gpu.type_of(weight)
    rank, width = 1 if up is None else up.shape[-1], 4 if weight is None else weight.shape[-1]
    assert up is None or gpu.type_of(up) == kind
    assert all(gpu.type_of(x) == "float" for x in (through, gram, magnitude) if x is not None)
    every = 1 if gram is None else gram.shape[-1]
    numbers = (np.float32(scale), np.int32(first), np.int32(every), np.int32(rows))
    constants: Constants = {"T": kind, "G": "float", "K": width, "R": rank, "N": gpu.access(width, kind)}
    blocks = -(-rows * 32 // THREADS)
    gpu.launch("output_gain", "output_gain", blocks, THREADS, (gain, norm, *read, *numbers), constants)


def output_gain_backward(d_magnitude: Output, /, d_gain: Tensor, norm: Tensor | None) -> None:
    """d_magnitude (N,) <- d_gain (N,), norm (N,) or None: d_gain / norm."""
    if not d_magnitude.wanted:
        return
    (rows,) = d_gain.shape
    arguments = (d_magnitude, d_gain, norm, np.int32(rows), gpu.adds(d_magnitude))
    constants: Constants = {"T": "float", "G": gpu.type_of(d_magnitude), "K": 4, "R": 1, "N": 4}
    gpu.launch("output_gain", "output_gain_backward", -(-rows // THREADS), THREADS, arguments, constants)


KERNELS = (gpu.Kernel(output_gain), gpu.Kernel(output_gain_backward))
