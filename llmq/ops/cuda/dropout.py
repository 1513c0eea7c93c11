"""Dropout on the GPU; see cuda/dropout.cu."""

from __future__ import annotations

import math

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda.launch import Kernel, access, launch, plain, pointer, type_of
from llmq.ops.reference.dropout import STEPS, dropped_steps

THREADS = 256  # dropout.cu
WORD = 0xFFFFFFFF


def dropout(
    out: Output,
    /,
    x: Tensor,
    samples: Tensor,
    residual: Tensor | None,
    *,
    rate: float,
    seed: int,
    stream: int,
    first: int,
    length: int,
) -> None:
    """out (...,K) <- x (...,K), samples (B,) int32, residual (...,K) or None: keep x / (1 - rate) + residual."""
    if not out.wanted:
        return
    kind, size, width = type_of(x), math.prod(x.shape), x.shape[-1]
    assert type_of(out) == kind and (residual is None or type_of(residual) == kind)
    number, level = access(width, kind), dropped_steps(rate)
    key = (np.uint32(level), np.uint32(seed & WORD), np.uint32((stream ^ (seed >> 32)) & WORD))
    scale = np.float32(STEPS / (STEPS - level))
    place = (np.int64(first), np.int64(length), np.int64(size))
    arguments = (plain(out), pointer(x), pointer(samples), pointer(residual), scale, *key, *place)
    blocks = -(-size // (THREADS * number))
    launch("dropout", "dropout", blocks, THREADS, arguments, {"T": kind, "N": number, "WIDTH": width})


KERNELS = (Kernel(dropout),)
