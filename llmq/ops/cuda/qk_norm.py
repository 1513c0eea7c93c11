"""RMSNorm of query and key heads on the GPU; see cuda/qk_norm.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda.launch import (
    SUM_THREADS,
    SUMS_ROWS,
    Kernel,
    access,
    adds,
    forms,
    kind_of,
    launch,
    plain,
    pointer,
    room,
    rows_of,
    type_of,
)
from llmq.ops.seam import Arguments

THREADS, WARPS, STEPS, TILE_WIDTH, WARP, SUM_SIDE = 256, 8, 2, 128, 32, 8  # qk_norm.cu


def qk_norm_forward(
    out: Output,
    rstd: Output,
    /,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> None:
    """out (B,T,(Hq+2Hkv)*Hd), rstd (B,T,Hq+Hkv) <- qkv like out, q_weight (Hd,), k_weight (Hd,)."""
    wanted: dict[str, int | str] = {"FORMS": int(out.wanted), "E4M3": 1}
    constants = _constants(type_of(qkv), "float", q_weight.shape[-1], num_heads, num_kv_heads, wanted)
    heads = rows_of(qkv.shape) * (num_heads + 2 * num_kv_heads)
    assert heads < 2**32, "heads of all rows are counted in 32 bits"
    per_block = WARPS * STEPS * (32 // int(constants["LANES"]))
    read = (pointer(qkv), pointer(q_weight), pointer(k_weight), np.float32(eps), np.int64(rows_of(qkv.shape)))
    arguments = (plain(out), plain(rstd), *read)
    launch("qk_norm", "qk_norm_forward", -(-heads // per_block), THREADS, arguments, constants)


def qk_norm_backward(
    d_qkv: Output,
    d_q_weight: Output,
    d_k_weight: Output,
    /,
    d_out: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rstd: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    scratch: Any = None,
) -> None:
    """d_qkv (B,T,(Hq+2Hkv)*Hd), d_q_weight (Hd,), d_k_weight (Hd,) <- d_out, qkv like d_qkv, weights, rstd."""
    rows, width = rows_of(qkv.shape), q_weight.shape[-1]
    weights = [output for output in (d_q_weight, d_k_weight) if output.wanted]
    kinds = [type_of(output) for output in weights] or ["float"]
    assert len(set(kinds)) == 1, "both weights' gradients have one dtype"
    wanted, outputs = forms(d_qkv)
    constants = _constants(type_of(qkv), kinds[0], width, num_heads, num_kv_heads, wanted)
    parts = -(-rows // SUMS_ROWS)
    partial = room(scratch, _scratch_bytes(qkv.shape, q_weight.shape)) if weights else 0
    read = (pointer(d_out), pointer(qkv), pointer(q_weight), pointer(k_weight), pointer(rstd))
    arguments = (*outputs, partial, *read, np.int64(rows))
    lanes, number = int(constants["LANES"]), int(constants["N"])
    across = -(-(num_heads + 2 * num_kv_heads) // max(1, min(TILE_WIDTH // number, WARP) // lanes))
    launch("qk_norm", "qk_norm_backward", parts * across, THREADS, arguments, constants)
    if weights:
        last = (plain(d_q_weight), plain(d_k_weight), partial, np.int32(parts), adds(d_q_weight), adds(d_k_weight))
        launch("qk_norm", "sum_weights", 2 * -(-width // SUM_SIDE), SUM_THREADS, last, constants)


def _scratch_bytes(qkv: tuple[int, ...], q_weight: tuple[int, ...]) -> int:
    """Bytes of scratch for these shapes: a partial row for every 256 rows of every head."""
    return -(-rows_of(qkv) // SUMS_ROWS) * (qkv[-1] // q_weight[-1]) * q_weight[-1] * 4


def _refuse_heads(kind: str, head_dim: int) -> None:
    """UsageError for heads that no warp holds."""
    number = access(head_dim, kind)
    if head_dim > 32 * number:
        fix = "--model-dtype bf16 or --device cpu" if kind == "float" else "--device cpu"
        raise UsageError(
            f"head_dim {head_dim} is wider than the {32 * number} that a warp of the GPU normalises, {number} numbers "
            f"at a time: use {fix}"
        )


def _constants(
    kind: str, gradient: str, width: int, heads: int, kv_heads: int, wanted: dict[str, int | str]
) -> dict[str, int | str]:
    _refuse_heads(kind, width)
    number = access(width, kind)
    lanes = 1 << (width // number - 1).bit_length()
    sizes = {"HQ": heads, "HKV": kv_heads, "HD": width, "N": number, "LANES": lanes}
    return {"T": kind, "G": gradient, **sizes, **wanted}


def _refuse(call: Arguments, capability: int) -> None:
    qkv, q_weight = call.reads["qkv"], call.reads["q_weight"]
    _refuse_heads(kind_of(qkv.dtype, qkv.name), q_weight.shape[-1])


KERNELS = (
    Kernel(qk_norm_forward, refuse=_refuse),
    Kernel(
        qk_norm_backward,
        lambda call: _scratch_bytes(call.reads["qkv"].shape, call.reads["q_weight"].shape),
        _refuse,
    ),
)
