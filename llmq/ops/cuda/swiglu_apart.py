"""SwiGLU of a gate and an up apart on the GPU; see cuda/swiglu_apart.cu."""

import math

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu

PACKS = 2  # of a thread (swiglu_apart.cu)


def swiglu_apart_forward(act: Output, /, gate: Tensor, up: Tensor) -> None:
    """act (...,F) <- gate, up like act."""
    _launch("swiglu_apart_forward", (act,), (gate, up))


def swiglu_apart_backward(d_gate: Output, d_up: Output, /, d_act: Tensor, gate: Tensor, up: Tensor) -> None:
    """d_gate, d_up (...,F) <- d_act, gate, up like d_gate."""
    _launch("swiglu_apart_backward", (d_gate, d_up), (d_act, gate, up))


def _launch(entry: str, written: tuple[Output, ...], read: tuple[Tensor, ...]) -> None:
    kind, count = gpu.type_of(*written, *read), math.prod(read[0].shape)
    number = gpu.access(count, kind)
    blocks = -(-count // (gpu.TILE_THREADS * PACKS * number))
    arguments = (*written, *read, np.int64(count))
    gpu.launch("swiglu_apart", entry, blocks, gpu.TILE_THREADS, arguments, {"T": kind, "N": number})
