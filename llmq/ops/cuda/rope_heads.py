"""Rotary embedding of heads on the GPU; see cuda/rope_heads.cu."""

import math
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.seam import Arguments


def _refuse_odd(call: Arguments, capability: int) -> None:
    """UsageError for heads whose halves are read two numbers at a time and are odd."""
    heads = next(iter(call.reads.values()))
    if heads.shape[-1] % 4 and gpu.kind_of(heads.dtype, heads.name) == "bf16":
        raise UsageError(f"head_dim {heads.shape[-1]}: half of it is odd, which fp32 alone can have on the GPU")


@gpu.asks(refuse=_refuse_odd)
def rope_heads_forward(out_q: Output, out_k: Output, /, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """out_q (B,T,Hq,Hd), out_k (B,T,Hkv,Hd) <- q, k like them, cos, sin (B or 1,T,Hd)."""
    _turn_heads(out_q, out_k, q, k, cos, sin, 1)


@gpu.asks(refuse=_refuse_odd)
def rope_heads_backward(
    d_q: Output, d_k: Output, /, d_out_q: Tensor, d_out_k: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """d_q (B,T,Hq,Hd), d_k (B,T,Hkv,Hd) <- d_out_q, d_out_k like them, cos, sin (B or 1,T,Hd)."""
    _turn_heads(d_q, d_k, d_out_q, d_out_k, cos, sin, -1)


def _turn_heads(out_q: Output, out_k: Output, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: int) -> None:
    kind, (batch, length, heads, width) = gpu.type_of(out_q, out_k, q, k, cos, sin), q.shape
    arrays = (_array(out_q, q), _array(out_k, k), q.array, k.array)
    # an axis of one is never stepped along, and libraries give it any stride
    steps = [
        step // array.dtype.itemsize if size > 1 else 0
        for array in arrays
        for size, step in zip(array.shape[:3], array.strides, strict=False)
    ]
    number = gpu.access(math.gcd(width // 2, *steps), kind)
    sizes = {"HQ": heads, "HKV": k.shape[2], "HD": width, "N": number, "SIGN": sign}
    steps.append(length * width if cos.shape[0] > 1 else 0)
    rows = batch * length
    arguments = (out_q, out_k, q, k, cos, sin, *map(np.int64, steps), np.int32(rows), np.int32(length))
    blocks = -(-rows * (heads + k.shape[2]) * (width // 2 // number) // gpu.TILE_THREADS)
    gpu.launch("rope_heads", "rope_heads", blocks, gpu.TILE_THREADS, arguments, {"T": kind, **sizes})


def _array(out: Output, like: Tensor) -> Any:
    """Where an output is written; of one that is not read, anything."""
    return out.tensors[0].array if out.wanted else like.array
