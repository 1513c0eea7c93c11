"""SwiGLU on the GPU; see cuda/swiglu.cu and cuda/swiglu_apart.cu."""

import math

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.activation import launch_tiles

APART_PACKS = 2  # of a thread (swiglu_apart.cu)


def swiglu_forward(act: Output, /, gate_up: Tensor, *, activation: str = "silu") -> None:
    """act (B,T,F) <- gate_up (B,T,2F)."""
    launch_tiles("swiglu", "swiglu_forward", act, gate_up.shape[-1] // 2, (gate_up,), activation)


def swiglu_backward(d_gate_up: Output, /, d_act: Tensor, gate_up: Tensor, *, activation: str = "silu") -> None:
    """d_gate_up (B,T,2F) <- d_act (B,T,F), gate_up (B,T,2F)."""
    launch_tiles("swiglu", "swiglu_backward", d_gate_up, gate_up.shape[-1] // 2, (d_act, gate_up), activation)


def swiglu_apart_forward(act: Output, /, gate: Tensor, up: Tensor) -> None:
    """act (...,F) <- gate, up like act."""
    _launch_apart("swiglu_apart_forward", (act,), (gate, up))


def swiglu_apart_backward(d_gate: Output, d_up: Output, /, d_act: Tensor, gate: Tensor, up: Tensor) -> None:
    """d_gate, d_up (...,F) <- d_act, gate, up like d_gate."""
    _launch_apart("swiglu_apart_backward", (d_gate, d_up), (d_act, gate, up))


def _launch_apart(entry: str, written: tuple[Output, ...], read: tuple[Tensor, ...]) -> None:
    kind, count = gpu.type_of(*written, *read), math.prod(read[0].shape)
    number = gpu.access(count, kind)
    blocks = -(-count // (gpu.TILE_THREADS * APART_PACKS * number))
    arguments = (*written, *read, np.int64(count))
    gpu.launch("swiglu_apart", entry, blocks, gpu.TILE_THREADS, arguments, {"T": kind, "N": number})
