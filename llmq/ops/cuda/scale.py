"""Multiples and soft-caps on the GPU; see cuda/scale.cu and cuda/softcap.cu."""

import math

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu

THREADS = 256


def scale(y: Output, /, x: Tensor, residual: Tensor | None, *, factor: float) -> None:
    """y (...,C) <- x (...,C), residual (...,C) or None: factor x + residual."""
    _launch("scale", "scale", y, (x, residual), (np.float32(factor),))


def softcap_forward(y: Output, /, x: Tensor, *, cap: float, factor: float = 1.0) -> None:
    """y (...,V) <- x (...,V): cap tanh(factor x / cap), or factor x."""
    _launch("softcap", "softcap_forward", y, (x,), (np.float32(cap), np.float32(factor)))


def softcap_backward(d_x: Output, /, d_y: Tensor, y: Tensor, *, cap: float, factor: float = 1.0) -> None:
    """d_x (...,V) <- d_y, y (...,V): factor d_y (1 - (y / cap)^2)."""
    _launch("softcap", "softcap_backward", d_x, (d_y, y), (np.float32(cap), np.float32(factor)))


def _launch(
    file: str, entry: str, out: Output, read: tuple[Tensor | None, ...], numbers: tuple[np.float32, ...]
) -> None:
    kind, size = gpu.type_of(out, *read), math.prod(out.shape)
    number = gpu.access(size, kind)
    blocks = -(-size // (THREADS * number))
    gpu.launch(file, entry, blocks, THREADS, (out, *read, *numbers, np.int64(size)), {"T": kind, "N": number})
