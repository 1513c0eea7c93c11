"""Dropout, and noise on embedded tokens, on the GPU; see cuda/dropout.cu and cuda/embedding_noise.cu."""

import math
from typing import Any

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.reference.noise import STEPS, dropped_steps

THREADS = 256


def dropout(out: Output, /, *read: Any, rate: float, seed: int, stream: int, first: int, length: int) -> None:
    """out (...,K) <- x (...,K), samples (B,) int32, residual (...,K) or None: keep x / (1 - rate) + residual."""
    x, _, residual = read
    kind, size, width = gpu.type_of(x, out, residual), math.prod(x.shape), x.shape[-1]
    number, level = gpu.access(width, kind), dropped_steps(rate)
    scale = np.float32(STEPS / (STEPS - level))
    place = (np.int64(first), np.int64(length), np.int64(size))
    arguments = (out, *read, scale, np.uint32(level), *gpu.random_key(seed, stream), *place)
    blocks = -(-size // (THREADS * number))
    gpu.launch("dropout", "dropout", blocks, THREADS, arguments, {"T": kind, "N": number, "WIDTH": width})


@gpu.asks(refuse=lambda call, _: gpu.at_most(gpu.GRID_SIDE, call.reads["res"].shape[0], "sequences", "--neftune-alpha"))
def embedding_noise(out: Output, /, res: Tensor, samples: Tensor, *, alpha: float, seed: int, stream: int) -> None:
    """out (B,T,C) <- res (B,T,C), samples (B,) int32: res + u alpha / sqrt(T C), u uniform in [-1, 1)."""
    kind, size = gpu.type_of(res, out), math.prod(res.shape[1:])
    number = gpu.access(size, kind)
    grid = (-(-size // (THREADS * number)), res.shape[0])
    scale = np.float32(alpha / math.sqrt(size))
    arguments = (out, res, samples, scale, *gpu.random_key(seed, stream), np.int64(size))
    gpu.launch("embedding_noise", "embedding_noise", grid, THREADS, arguments, {"T": kind, "N": number})
