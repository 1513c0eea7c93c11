"""The next token on the GPU, and the repetition penalty; see cuda/sample.cu and cuda/penalize.cu."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants

THREADS, CLUSTER = 1024, 8
WORD = 0xFFFFFFFF


def penalize(out: Output, new_seen: Output, /, logits: Tensor, seen: Tensor, tokens: Tensor, *, penalty: float) -> None:
    """out (B,1,Vp) fp32, new_seen (B,Vp) int32 <- logits (B,1,Vp), seen (B,Vp) int32, tokens (B,1) int32."""
    batch, columns = seen.shape
    assert not out.wanted or gpu.type_of(out) == "float"
    arguments = (out, new_seen, logits, seen, tokens, np.float32(penalty))
    constants: Constants = {"T": gpu.type_of(logits), "VP": columns}
    gpu.launch("penalize", "penalize", (-(-columns // 256), batch), 256, arguments, constants)


def sample(
    *operands: Any, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """next_tokens, next_positions (B,1) int32 <- logits (B,1,Vp), positions (B,1) int32, samples (B,) int32."""
    logits = operands[2]
    kind, (batch, _, columns) = gpu.type_of(logits), logits.shape
    number = gpu.access(columns, kind)
    assert number % 4 == 0, f"{logits.name}: rows of {columns} are not read by fours"
    cuts = {"GREEDY": int(temperature == 0), "TOP_K": int(0 < top_k < vocab_size), "TOP_P": int(top_p < 1)}
    cluster = CLUSTER if gpu.capability() >= 90 and columns > number * THREADS else 1
    constants: Constants = {"T": kind, "V": vocab_size, "VP": columns, "N": number, "CLUSTER": cluster, **cuts}
    inverse = np.float32(1 / temperature if temperature else 1)
    numbers = (np.float32(top_k), np.float32(top_p), np.float32(math.log(min_p) if min_p else -math.inf))
    key = (np.uint32(seed & WORD), np.uint32((seed >> 32) & WORD))
    arguments = (*operands, *key, inverse, *numbers)
    gpu.launch("sample", "sample", batch * cluster, THREADS, arguments, constants, early=True)


KERNELS = (gpu.Kernel(penalize), gpu.Kernel(sample))
