"""Rotary embedding on the GPU; see cuda/rope.cu and cuda/rope_heads.cu."""

import math
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.seam import Arguments


def _refuse(call: Arguments, capability: int) -> None:
    """UsageError for heads whose halves are odd: bf16 is read, and fp8 columns are written, two numbers at a time."""
    heads, head_dim = next(iter(call.reads.values())), call.reads["table"].shape[-1]
    if head_dim % 4 == 0:
        return
    start = f"head_dim {head_dim}: half of it is odd, and"
    if gpu.kind_of(heads.dtype, heads.name) == "bf16":
        raise UsageError(f"{start} bf16 is read two numbers at a time: use --model-dtype fp32, or --device cpu")
    if call.writes_columns:
        raise UsageError(
            f"{start} gradients are written as fp8 columns two at a time: use --fp8-scaling current, or "
            "--matmul-dtype bf16"
        )


def _refuse_odd(call: Arguments, capability: int) -> None:
    """UsageError for heads whose halves are read two numbers at a time and are odd."""
    heads = next(iter(call.reads.values()))
    if heads.shape[-1] % 4 and gpu.kind_of(heads.dtype, heads.name) == "bf16":
        raise UsageError(f"head_dim {heads.shape[-1]}: half of it is odd, which fp32 alone can have on the GPU")


@gpu.asks(refuse=_refuse)
def rope_forward(
    out: Output, /, qkv: Tensor, table: Tensor, positions: Tensor, *, num_heads: int, num_kv_heads: int
) -> None:
    """out (B,T,(Hq+2Hkv)*Hd) <- qkv like out, table (max_T,Hd) cos | sin fp32, positions (B,T) int32."""
    _turn(out, qkv, table, positions, num_heads, num_kv_heads, 1)


@gpu.asks(refuse=_refuse)
def rope_backward(
    d_qkv: Output, /, d_out: Tensor, table: Tensor, positions: Tensor, *, num_heads: int, num_kv_heads: int
) -> None:
    """d_qkv (B,T,(Hq+2Hkv)*Hd) <- d_out like d_qkv, table (max_T,Hd) fp32, positions (B,T) int32."""
    _turn(d_qkv, d_out, table, positions, num_heads, num_kv_heads, -1)


def _turn(
    out: Output, x: Tensor, table: Tensor, positions: Tensor, num_heads: int, num_kv_heads: int, sign: int
) -> None:
    assert gpu.type_of(table) == "float"
    kind, width, rows = gpu.type_of(x, out), table.shape[-1], gpu.rows_of(x.shape)
    wanted, outputs = gpu.forms(out)
    in_place = wanted["FORMS"] == gpu.VALUE and outputs[0] == gpu.pointer(x)
    bits = int(wanted["FORMS"])
    number = gpu.access(width // 2, kind)
    if bits & (gpu.SUMS | gpu.COL):
        # angles of 4 channels are 16 bytes, and serve two heads; a row of lanes is half a head where that is 8 or 16
        number, together = min(number, 4), 2
        lanes = 16 if width // 2 // number >= 16 else 8
    else:
        lanes, together = 32, 1
    heads, turned = num_heads + 2 * num_kv_heads, num_heads + num_kv_heads
    sizes = {"HEADS": heads, "TURNED": turned, "HD": width, "N": number, "LANES": lanes, "TOGETHER": together}
    sizes |= {"SIGN": sign, "IN_PLACE": int(in_place)}
    units = -(-(turned if in_place else heads) // together) * (width // 2 // number)
    height = gpu.SUMS_ROWS if bits & gpu.SUMS else gpu.TILE_ROWS if bits & gpu.COL else 4 * gpu.TILE_THREADS // lanes
    blocks = -(-units // lanes) * -(-rows // height)
    arguments = (*outputs, x, table, positions, np.int64(rows))
    gpu.launch("rope", "rope", blocks, gpu.TILE_THREADS, arguments, {"T": kind, **sizes, **wanted})


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
