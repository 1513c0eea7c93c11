"""Dropout on the GPU; see cuda/dropout.cu."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llmq.operands import Output
from llmq.ops.cuda import launch as gpu
from llmq.ops.reference.dropout import STEPS, dropped_steps

THREADS = 256  # dropout.cu
WORD = 0xFFFFFFFF


def dropout(out: Output, /, *read: Any, rate: float, seed: int, stream: int, first: int, length: int) -> None:
    """out (...,K) <- x (...,K), samples (B,) int32, residual (...,K) or None: keep x / (1 - rate) + residual."""
    if not out.wanted:
        return
    x, _, residual = read
    kind, size, width = gpu.type_of(x), math.prod(x.shape), x.shape[-1]
    assert gpu.type_of(out) == kind and (residual is None or gpu.type_of(residual) == kind)
    number, level = gpu.access(width, kind), dropped_steps(rate)
    key = (np.uint32(level), np.uint32(seed & WORD), np.uint32((stream ^ (seed >> 32)) & WORD))
    scale = np.float32(STEPS / (STEPS - level))
    place = (np.int64(first), np.int64(length), np.int64(size))
    arguments = (out, *read, scale, *key, *place)
    blocks = -(-size // (THREADS * number))
    gpu.launch("dropout", "dropout", blocks, THREADS, arguments, {"T": kind, "N": number, "WIDTH": width})


KERNELS = (gpu.Kernel(dropout),)
