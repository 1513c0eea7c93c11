"""Noise on the embedded tokens on the GPU; see cuda/embedding_noise.cu."""

from __future__ import annotations

import math

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu

THREADS = 256  # embedding_noise.cu
WORD = 0xFFFFFFFF


def embedding_noise(out: Output, /, res: Tensor, samples: Tensor, *, alpha: float, seed: int, stream: int) -> None:
    """out (B,T,C) <- res (B,T,C), samples (B,) int32: res + u alpha / sqrt(T C), u uniform in [-1, 1)."""
    if not out.wanted:
        return
    _refuse_rows(res.shape[0])
    kind, size = gpu.type_of(res), math.prod(res.shape[1:])
    assert gpu.type_of(out) == kind
    number = gpu.access(size, kind)
    grid = (-(-size // (THREADS * number)), res.shape[0])
    key = (np.uint32(seed & WORD), np.uint32((stream ^ (seed >> 32)) & WORD))
    scale = np.float32(alpha / math.sqrt(size))
    arguments = (out, res, samples, scale, *key, np.int64(size))
    gpu.launch("embedding_noise", "embedding_noise", grid, THREADS, arguments, {"T": kind, "N": number})


def _refuse_rows(batch: int) -> None:
    """UsageError for more sequences than one launch takes."""
    if batch > gpu.GRID_SIDE:
        raise UsageError(
            f"--neftune-alpha takes micro-batches of {gpu.GRID_SIDE} sequences at most on the GPU, not {batch}: use a "
            "smaller --batch-size with more --grad-accumulation"
        )


KERNELS = (gpu.Kernel(embedding_noise, refuse=lambda call, _: _refuse_rows(call.reads["res"].shape[0])),)
