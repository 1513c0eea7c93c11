"""Products with at most 4 columns, which generation makes one token at a time: our own kernel, bound by reading the
weight, where cuBLASLt would start a matrix product; see cuda/thin_matmul.cu."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from llmq.ops.cuda.compile import Constants
from llmq.ops.cuda.launch import TYPES, launch

if TYPE_CHECKING:
    from llmq.ops.cuda.cublaslt import Gemm, Pointers

MOST = 4  # columns: with more, reading x from L1 takes as long as reading the weight from memory
WARPS = 8  # of a block
ENOUGH_WARPS = 4096  # to keep the memory of an H200 busy


def takes(problem: Gemm) -> bool:
    """Whether the kernel computes a product: few columns, both operands plain with the summed axis innermost."""
    a, b, d = problem.a, problem.b, problem.d
    if problem.n > MOST or not a.transposed or b.transposed or a.dtype != b.dtype or a.scale or b.scale:
        return False
    if a.dtype not in ("bf16", "fp32") or d.dtype not in ("bf16", "fp32") or problem.bias not in (None, a.dtype):
        return False
    access = 16 // (2 if a.dtype == "bf16" else 4)
    return problem.alignment >= 16 and not any(number % access for number in (problem.k, a.ld, b.ld))


def bound(problem: Gemm, pointers: Pointers, alpha: float) -> Callable[[int], None]:
    """One product, ready to be run again and again; it needs no workspace."""
    kind = TYPES[problem.a.dtype]
    access = 8 if kind == "bf16" else 4
    split = next((n for n in (1, 2, 4) if problem.m * n >= ENOUGH_WARPS), WARPS)
    sizes: Constants = {
        "T": kind,
        "D": TYPES[problem.d.dtype],
        "K": problem.k,
        "M": problem.n,
        "N": access,
        "SPLIT": split,
    }
    epilogue: Constants = {"BIAS": int(problem.bias is not None), "RESIDUAL": int(problem.c is not None)}
    constants: Constants = {**sizes, **epilogue}
    given = (pointers.d, pointers.a, pointers.b, pointers.c if problem.c else 0, pointers.bias, np.float32(alpha))
    arguments = (*given, *map(np.int64, (problem.m, problem.a.ld, problem.b.ld, problem.d.ld)))
    blocks = -(-problem.m // (WARPS // split))
    return lambda workspace: launch("thin_matmul", "thin_matmul", blocks, 32 * WARPS, arguments, constants)
