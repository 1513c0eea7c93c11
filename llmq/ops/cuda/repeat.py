"""Random weights of a bench on the GPU; see cuda/repeat.cu."""

from __future__ import annotations

import math

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda.compile import Constants
from llmq.ops.cuda.launch import Kernel, access, launch, plain, pointer, type_of

THREADS = 256  # repeat.cu


def repeat(out: Output, /, block: Tensor, *, first: int) -> None:
    """out (any shape) <- block (n,): its flat element i is element (first + i) mod n of the block."""
    if not out.wanted:
        return
    count = math.prod(out.shape)
    number = access(count, type_of(out))
    arguments = (plain(out), pointer(block), np.int64(first % block.shape[0]), np.int64(block.shape[0]))
    constants: Constants = {"X": type_of(block), "T": type_of(out), "N": number}
    blocks = -(-count // (THREADS * number))
    launch("repeat", "repeat", blocks, THREADS, (*arguments, np.int64(count)), constants)


KERNELS = (Kernel(repeat),)
