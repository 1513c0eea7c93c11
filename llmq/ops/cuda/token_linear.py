"""The linear maps of one token at a time, with the norm before and SwiGLU after them; see cuda/token_linear.cu."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llmq.operands import Output
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants
from llmq.ops.seam import Arguments

WARPS, MOST_TOKENS = 8, 4
MOST_ACCESSES = 8  # of 16 bytes that a lane has under way
ENOUGH_WARPS = 32768  # to keep the memory of an H200 busy
RESIDENT = 4  # blocks to a multiprocessor


def token_linear(y: Output, /, *read: Any, eps: float, gated: bool) -> None:
    """y (B,1,N) <- x (B,1,K), norm (K,) or None, weight (N,K) or (2N,K), bias (N,) or (2N,) or None, residual (B,1,N)
    or None. What no kernel of a program writes, as the weight, is read before the kernels before it are done."""
    if not y.wanted:
        return
    x, norm, weight, bias, residual = read
    kind, tokens, columns, rows = gpu.type_of(x), math.prod(x.shape[:-1]), x.shape[-1], y.shape[-1]
    assert gpu.type_of(y) == gpu.type_of(weight) == kind and tokens <= MOST_TOKENS, f"{y.name}: {tokens} tokens"
    number = gpu.access(columns, kind)
    split = _split(rows, -(-columns // (32 * number)), int(gated))
    shape: Constants = {"T": kind, "K": columns, "M": tokens, "N": number, "SPLIT": split}
    parts = {"NORM": norm, "BIAS": bias, "RESIDUAL": residual}
    constants: Constants = {**shape, "GATED": int(gated), **{name: int(one is not None) for name, one in parts.items()}}
    arguments = (y, weight, x, norm, bias, residual, np.float32(eps), np.int32(rows))
    shared = tokens * columns * gpu.size_of(kind) if norm is not None else 0
    blocks = _blocks(-(-rows * split // WARPS), RESIDENT * gpu.multiprocessors())
    gpu.launch(
        "token_linear", "token_linear", blocks, 32 * WARPS, arguments, constants, shared_bytes=shared, early=True
    )


def _blocks(needed: int, resident: int) -> int:
    """Blocks to launch: where a few would be left for a second round, the others take their rows."""
    return resident if resident < needed < 2 * resident else needed


def _split(rows: int, accesses: int, gated: int) -> int:
    """Warps to a row: as few as have all of it under way, or as keep the memory busy. `accesses`: those of a warp."""
    most = MOST_ACCESSES // (1 + gated)
    return next((n for n in (1, 2, 4) if accesses <= most * n or rows * n >= ENOUGH_WARPS), WARPS)


def _refuse(call: Arguments, capability: int) -> None:
    x = call.reads["x"]
    gpu.access(x.shape[-1], gpu.kind_of(x.dtype, x.name))


KERNELS = (gpu.Kernel(token_linear, refuse=_refuse),)
