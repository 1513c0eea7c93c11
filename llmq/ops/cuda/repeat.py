"""Random weights of a bench on the GPU; see cuda/repeat.cu."""

from __future__ import annotations

import math

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants

THREADS = 256  # repeat.cu


def repeat(out: Output, /, block: Tensor, *, first: int) -> None:
    """out (any shape) <- block (n,): its flat element i is element (first + i) mod n of the block."""
    if not out.wanted:
        return
    count = math.prod(out.shape)
    number = gpu.access(count, gpu.type_of(out))
    arguments = (out, block, np.int64(first % block.shape[0]), np.int64(block.shape[0]))
    constants: Constants = {"X": gpu.type_of(block), "T": gpu.type_of(out), "N": number}
    blocks = -(-count // (THREADS * number))
    gpu.launch("repeat", "repeat", blocks, THREADS, (*arguments, np.int64(count)), constants)


KERNELS = (gpu.Kernel(repeat),)
