"""What AdaLoRA adds to a step on the GPU; see cuda/importance.cu."""

from __future__ import annotations

import math

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants
from llmq.tensor import num_norm_tiles

THREADS = 256  # importance.cu


def orthogonality(
    coefficient: Output, /, gram: Tensor, targets: Tensor, *, weight: float, first: int, present: int
) -> None:
    """coefficient (R,S) <- gram (S,S) f32, targets (B,T) int32: 2 weight n (G - I) / |G - I|, and 0 beside it."""
    if not coefficient.wanted:
        return
    rank, every = coefficient.shape
    assert gpu.type_of(gram) == "float", "products of an adapter's rows are f32"
    numbers = (np.int64(math.prod(targets.shape)), np.float32(weight), *map(np.int32, (first, present, rank, every)))
    constants: Constants = {"T": gpu.type_of(coefficient), "G": "float"}
    arguments = (coefficient, gram, targets, *numbers)
    gpu.launch("importance", "orthogonality", 1, THREADS, arguments, constants)


def importance(
    new_sensitivity: Output, new_uncertainty: Output, /, *read: Tensor, beta_1: float, beta_2: float
) -> None:
    """new_sensitivity, new_uncertainty <- those before, f32, weight, grad (one shape), cells scale, apply (1,)."""
    _, _, weight, grad, *_ = read
    count = math.prod(weight.shape)
    betas = tuple(np.float32(number) for beta in (beta_1, beta_2) for number in (beta, 1 - beta))
    arguments = (new_sensitivity, new_uncertainty, *read, np.int64(count), *betas)
    constants: Constants = {"T": gpu.type_of(weight), "G": gpu.type_of(grad)}
    gpu.launch("importance", "importance", -(-count // THREADS), THREADS, arguments, constants)


def importance_sums(sums: Output, /, sensitivity: Tensor, uncertainty: Tensor, *, of_columns: bool) -> None:
    """sums <- sensitivity times uncertainty (N,R), f32: (P,R), of each column of 128 rows, or (N,), of each row."""
    if not sums.wanted:
        return
    constants: Constants = {"T": "float", "G": "float"}
    shape = sensitivity.shape
    rows, columns = (gpu.rows_of(shape), shape[-1]) if len(shape) > 1 else (shape[0], 1)
    arguments = (sums, sensitivity, uncertainty, np.int32(rows), np.int32(columns))
    if of_columns:
        gpu.launch("importance", "importance_of_columns", num_norm_tiles(shape), THREADS, arguments, constants)
    else:
        gpu.launch("importance", "importance_of_rows", -(-rows * 32 // THREADS), THREADS, arguments, constants)


KERNELS = (gpu.Kernel(orthogonality), gpu.Kernel(importance), gpu.Kernel(importance_sums))
