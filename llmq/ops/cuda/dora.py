"""Magnitudes of adapters on the GPU; see cuda/dora.cu."""

from __future__ import annotations

import numpy as np

from llmq.ops.cuda.compile import Constants
from llmq.ops.cuda.launch import Kernel, access, adds, launch, plain, pointer, type_of
from llmq.tensor import Output, Tensor

THREADS = 256  # dora.cu


def dora_gain(
    gain: Output,
    norm: Output,
    /,
    weight: Tensor,
    through: Tensor | None,
    gram: Tensor | None,
    up: Tensor | None,
    magnitude: Tensor | None,
    *,
    scale: float,
    first: int,
) -> None:
    """gain (N,), norm (N,) <- weight (N,K), and through (N,S), gram (S,S), up (N,R), magnitude (N,) or None."""
    if not gain.wanted and not norm.wanted:
        return
    (rows, width), kind = weight.shape, type_of(weight)
    rank = 1 if up is None else up.shape[-1]
    assert up is None or type_of(up) == kind
    assert all(type_of(x) == "float" for x in (through, gram, magnitude) if x is not None)
    read = tuple(pointer(x) for x in (weight, through, gram, up, magnitude))
    every = 1 if gram is None else gram.shape[-1]
    numbers = (np.float32(scale), np.int32(first), np.int32(every), np.int32(rows))
    constants: Constants = {"T": kind, "G": "float", "K": width, "R": rank, "N": access(width, kind)}
    blocks = -(-rows * 32 // THREADS)
    launch("dora", "dora_gain", blocks, THREADS, (plain(gain), plain(norm), *read, *numbers), constants)


def dora_magnitude(d_magnitude: Output, /, d_gain: Tensor, norm: Tensor) -> None:
    """d_magnitude (N,) <- d_gain (N,), norm (N,): d_gain / norm."""
    if not d_magnitude.wanted:
        return
    (rows,) = d_gain.shape
    arguments = (plain(d_magnitude), pointer(d_gain), pointer(norm), np.int32(rows), adds(d_magnitude))
    constants: Constants = {"T": "float", "G": type_of(d_magnitude), "K": 4, "R": 1, "N": 4}
    launch("dora", "dora_magnitude", -(-rows // THREADS), THREADS, arguments, constants)


KERNELS = (Kernel(dora_gain), Kernel(dora_magnitude))
