"""RMSNorm of query and key heads on the GPU; see cuda/qk_norm.cu."""

from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.seam import Arguments

THREADS, WARPS, STEPS, TILE_WIDTH, WARP, SUM_SIDE = 256, 8, 2, 128, 32, 8  # qk_norm.cu


def qk_norm_forward(out: Output, rstd: Output, /, *read: Tensor, eps: float, **heads: int) -> None:
    """out (B,T,(Hq+2Hkv)*Hd), rstd (B,T,Hq+Hkv) <- qkv like out, q_weight (Hd,), k_weight (Hd,)."""
    qkv, q_weight, _ = read
    wanted: dict[str, int | str] = {"FORMS": int(out.wanted), "E4M3": 1}
    constants = _constants(gpu.type_of(qkv), "float", q_weight.shape[-1], wanted, **heads)
    rows = gpu.rows_of(qkv.shape)
    count = rows * (qkv.shape[-1] // q_weight.shape[-1])
    assert count < 2**32, "heads of all rows are counted in 32 bits"
    per_block = WARPS * STEPS * (32 // int(constants["LANES"]))
    arguments = (out, rstd, *read, np.float32(eps), np.int64(rows))
    gpu.launch("qk_norm", "qk_norm_forward", -(-count // per_block), THREADS, arguments, constants)


def qk_norm_backward(
    d_qkv: Output, d_q_weight: Output, d_k_weight: Output, /, *read: Tensor, scratch: Any = None, **heads: int
) -> None:
    """d_qkv (B,T,(Hq+2Hkv)*Hd), d_q_weight (Hd,), d_k_weight (Hd,) <- d_out, qkv like d_qkv, weights, rstd."""
    _, qkv, q_weight, _, _ = read
    rows, width = gpu.rows_of(qkv.shape), q_weight.shape[-1]
    weights = [output for output in (d_q_weight, d_k_weight) if output.wanted]
    kinds = [gpu.type_of(output) for output in weights] or ["float"]
    assert len(set(kinds)) == 1, "both weights' gradients have one dtype"
    wanted, outputs = gpu.forms(d_qkv)
    constants = _constants(gpu.type_of(qkv), kinds[0], width, wanted, **heads)
    parts = -(-rows // gpu.SUMS_ROWS)
    partial = gpu.room(scratch, _scratch_bytes(qkv.shape, q_weight.shape)) if weights else 0
    arguments = (*outputs, partial, *read, np.int64(rows))
    lanes, number = int(constants["LANES"]), int(constants["N"])
    across = -(-(qkv.shape[-1] // width) // max(1, min(TILE_WIDTH // number, WARP) // lanes))
    gpu.launch("qk_norm", "qk_norm_backward", parts * across, THREADS, arguments, constants)
    if weights:
        last = (d_q_weight, d_k_weight, partial, np.int32(parts), gpu.adds(d_q_weight), gpu.adds(d_k_weight))
        gpu.launch("qk_norm", "sum_weights", 2 * -(-width // SUM_SIDE), gpu.SUM_THREADS, last, constants)


def _scratch_bytes(qkv: tuple[int, ...], q_weight: tuple[int, ...]) -> int:
    """Bytes of scratch for these shapes: a partial row for every 256 rows of every head."""
    return -(-gpu.rows_of(qkv) // gpu.SUMS_ROWS) * (qkv[-1] // q_weight[-1]) * q_weight[-1] * 4


def _constants(
    kind: str, gradient: str, width: int, wanted: dict[str, int | str], *, num_heads: int, num_kv_heads: int
) -> dict[str, int | str]:
    number = gpu.access(width, kind)
    lanes = 1 << (width // number - 1).bit_length()
    sizes = {"HQ": num_heads, "HKV": num_kv_heads, "HD": width, "N": number, "LANES": lanes}
    return {"T": kind, "G": gradient, **sizes, **wanted}


def _refuse(call: Arguments, capability: int) -> None:
    """UsageError for heads that no warp holds."""
    qkv, head_dim = call.reads["qkv"], call.reads["q_weight"].shape[-1]
    kind = gpu.kind_of(qkv.dtype, qkv.name)
    number = gpu.access(head_dim, kind)
    if head_dim > 32 * number:
        fix = "--model-dtype bf16 or --device cpu" if kind == "float" else "--device cpu"
        raise UsageError(
            f"head_dim {head_dim} is wider than the {32 * number} that a warp of the GPU normalises, {number} numbers "
            f"at a time: use {fix}"
        )


KERNELS = (
    gpu.Kernel(qk_norm_forward, refuse=_refuse),
    gpu.Kernel(
        qk_norm_backward, lambda call: _scratch_bytes(call.reads["qkv"].shape, call.reads["q_weight"].shape), _refuse
    ),
)
