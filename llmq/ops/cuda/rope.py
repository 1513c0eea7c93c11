"""Rotary embedding on the GPU; see cuda/rope.cu."""

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
