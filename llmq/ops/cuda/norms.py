"""RMSNorm on the GPU, of rows and of heads; see cuda/rmsnorm.cu and cuda/qk_norm.cu."""

from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.seam import Arguments

PARTS = 512  # blocks of the backward pass, and partial rows of the weight's gradient: about 4 blocks per multiprocessor
HELD = 4  # accesses of a row that a lane holds at most
MOST_WARPS = 32  # of a block
# rows of a tile that is written transposed, the most that shared memory has room for; a part is a multiple of all
TALL, MIDDLE, LOW = 64, 32, 16
HEAD_THREADS, HEAD_WARPS, STEPS, TILE_WIDTH, WARP, SUM_SIDE = 256, 8, 2, 128, 32, 8  # qk_norm.cu


def _refuse(call: Arguments, capability: int) -> None:
    """UsageError for rows that no block holds, or, to be written as fp8 columns, no block of a card's shared memory."""
    offset_of(call)
    res, room = call.reads["res"], gpu.shared_bytes_limit(capability) - gpu.STATIC_BYTES
    columns, number = res.shape[-1], gpu.access_to(res)
    if columns > number * 32 * HELD * MOST_WARPS:
        raise UsageError(
            f"hidden size {columns} is wider than the {number * 32 * HELD * MOST_WARPS} that a block of the GPU "
            f"normalises, {number} numbers at a time: use --device cpu"
        )
    tile = LOW * _pitch(columns)
    if call.writes_columns and tile > room:
        raise UsageError(
            f"hidden size {columns}: to be written as columns {LOW} rows in fp8 take {tile} bytes of shared memory, "
            f"and a block of this GPU has {room}: use --fp8-scaling current, or --matmul-dtype bf16"
        )


def offset_of(call: Arguments) -> int:
    """What is added to the weight of a call's norm; UsageError for what the kernels do not add."""
    offset = call.numbers.get("offset", 0.0)
    if offset not in (0, 1):
        raise UsageError(f"the GPU adds 0 or 1 to the weight of a norm, and offset is {offset}: use --device cpu")
    return int(offset)


@gpu.asks(refuse=_refuse)
def rmsnorm_forward(
    x: Output, rstd: Output, /, res: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0
) -> None:
    """x (B,T,C), rstd (B,T) <- res (B,T,C), weight (C,)."""
    kind, rows = gpu.type_of(res, weight, x), gpu.rows_of(res.shape)
    wanted, outputs = gpu.forms(x, may_be_cut=True)
    constants = {**_constants(kind, "float", res.shape[-1], wanted, offset, forward=True), "RESIDUAL": 0}
    arguments = (*outputs, rstd, res, weight, np.float32(eps), np.int64(rows), np.int64(gpu.height(x)))
    _launch("rmsnorm_forward", -(-rows // int(constants["ROWS"])), arguments, constants)


@gpu.asks(lambda call: _scratch_bytes(call.reads["res"].shape), _refuse)
def rmsnorm_backward(
    d_out: Output,
    d_weight: Output,
    /,
    d_x: Tensor,
    d_res: Tensor | None,
    res: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    offset: float = 0.0,
    scratch: Any = None,
) -> None:
    """d_out (B,T,C), d_weight (C,) <- d_x (B,T,C), d_res (B,T,C) or None, res (B,T,C), weight (C,), rstd (B,T)."""
    kind, columns, rows = gpu.type_of(res), res.shape[-1], gpu.rows_of(res.shape)
    gradient = gpu.type_of(d_weight) if d_weight.wanted else "float"
    wanted, outputs = gpu.forms(d_out, may_be_cut=True)
    shape = _constants(kind, gradient, columns, wanted, offset, forward=False)
    constants = {**shape, "RESIDUAL": int(d_res is not None)}
    per_block = _rows_per_part(rows)
    parts = -(-rows // per_block)
    partial = gpu.room(scratch, _scratch_bytes(res.shape)) if d_weight.wanted else 0
    read = (d_x, d_res, res, weight, rstd)
    arguments = (*outputs, partial, *read, np.int32(per_block), np.int64(rows), np.int64(gpu.height(d_out)))
    _launch("rmsnorm_backward", parts, arguments, constants)
    if d_weight.wanted:
        last = (d_weight, partial, np.int32(parts), gpu.adds(d_weight))
        gpu.launch("rmsnorm", "sum_weight", -(-columns // gpu.SUM_COLUMNS), gpu.SUM_THREADS, last, constants)


def _launch(entry: str, blocks: int, arguments: tuple[Any, ...], constants: dict[str, int | str]) -> None:
    """A kernel with a group of warps to each row at a time, and a tile of rows where columns are written."""
    threads = 32 * int(constants["GROUP"]) * int(constants["GROUPS"])
    tile = int(constants["ROWS"]) * _pitch(int(constants["C"])) if int(constants["FORMS"]) & gpu.COL else 0
    gpu.launch("rmsnorm", entry, blocks, threads, arguments, constants, shared_bytes=tile)


def _scratch_bytes(res: tuple[int, ...]) -> int:
    """Bytes of scratch for this shape."""
    rows = gpu.rows_of(res)
    return -(-rows // _rows_per_part(rows)) * res[-1] * 4


def _rows_per_part(rows: int) -> int:
    """Rows of one block: a multiple of a tile's, so that parts do not depend on the forms."""
    return max(TALL, -(-rows // (PARTS * TALL)) * TALL)


def _constants(
    kind: str, gradient: str, columns: int, wanted: dict[str, int | str], offset: float, *, forward: bool
) -> dict[str, int | str]:
    assert not int(wanted["FORMS"]) & gpu.SUMS, "column sums of what a norm writes are never read"
    transposed, number = bool(int(wanted["FORMS"]) & gpu.COL), gpu.access(columns, kind)
    accesses = columns // number
    group = -(-accesses // (32 * HELD))
    warps, blocks, ahead = _shape(group, forward, transposed)
    groups = rows = max(1, warps // group)
    if transposed:
        limit = gpu.shared_bytes_limit() - gpu.STATIC_BYTES
        heights = ((TALL, limit // 2), (MIDDLE, limit), (LOW, limit))  # rows, and bytes that a block may have
        rows = next(rows for rows, room in heights if rows * _pitch(columns) <= room)
    held = -(-accesses // (32 * group))
    sizes = {"C": columns, "N": number, "GROUP": group, "VPT": held, "GROUPS": groups, "ROWS": rows}
    return {"T": kind, "G": gradient, **sizes, "BLOCKS": blocks, "AHEAD": ahead, "OFFSET": int(offset), **wanted}


def _shape(group: int, forward: bool, transposed: bool) -> tuple[int, int, int]:
    """Warps of a block, blocks to a multiprocessor at least, and whether the next row is read ahead.

    Backward has the same groups whatever the forms: they decide the order in which the weight's gradient is added.
    """
    if forward:
        return MOST_WARPS if transposed and group > 3 else 16, 1, 0
    # two groups of more than 8 warps would leave a thread 64 registers, and more than 16 are no block
    warps = 4 * group if group < 4 else 2 * group if group <= 8 else group
    if transposed:
        return warps, 2 if warps == 4 else 1, int(warps <= 12)
    if 16 % warps and warps <= 12:  # less than 16 to a multiprocessor, and registers left to hold another row
        return warps, 1, 1
    return warps, max(1, 16 // warps), 0


def _pitch(columns: int) -> int:
    return -(-columns // 128) * 128  # forms.cuh


def _refuse_heads(call: Arguments, capability: int) -> None:
    """UsageError for heads that no warp holds."""
    offset_of(call)
    qkv, head_dim = call.reads["qkv"], call.reads["q_weight"].shape[-1]
    kind = gpu.kind_of(qkv.dtype, qkv.name)
    number = gpu.access(head_dim, kind)
    if head_dim > 32 * number:
        fix = "--model-dtype bf16 or --device cpu" if kind == "float" else "--device cpu"
        raise UsageError(
            f"head_dim {head_dim} is wider than the {32 * number} that a warp of the GPU normalises, {number} numbers "
            f"at a time: use {fix}"
        )


@gpu.asks(refuse=_refuse_heads)
def qk_norm_forward(out: Output, rstd: Output, /, *read: Tensor, eps: float, **about: Any) -> None:
    """out (B,T,(Hq+2Hkv)*Hd), rstd (B,T,Hq+Hkv) <- qkv like out, q_weight (Hd,), k_weight (Hd,)."""
    qkv, q_weight, _ = read
    wanted: dict[str, int | str] = {"FORMS": int(out.wanted), "E4M3": 1}
    constants = _head_constants(gpu.type_of(qkv), "float", q_weight.shape[-1], wanted, **about)
    rows = gpu.rows_of(qkv.shape)
    count = rows * (qkv.shape[-1] // q_weight.shape[-1])
    assert count < 2**32, "heads of all rows are counted in 32 bits"
    per_block = HEAD_WARPS * STEPS * (32 // int(constants["LANES"]))
    arguments = (out, rstd, *read, np.float32(eps), np.int64(rows))
    gpu.launch("qk_norm", "qk_norm_forward", -(-count // per_block), HEAD_THREADS, arguments, constants)


@gpu.asks(lambda call: gpu.sums_bytes(call.reads["qkv"].shape), _refuse_heads)
def qk_norm_backward(
    d_qkv: Output, d_q_weight: Output, d_k_weight: Output, /, *read: Tensor, scratch: Any = None, **about: Any
) -> None:
    """d_qkv (B,T,(Hq+2Hkv)*Hd), d_q_weight (Hd,), d_k_weight (Hd,) <- d_out, qkv like d_qkv, weights, rstd."""
    _, qkv, q_weight, _, _ = read
    rows, width = gpu.rows_of(qkv.shape), q_weight.shape[-1]
    weights = [output for output in (d_q_weight, d_k_weight) if output.wanted]
    kinds = [gpu.type_of(output) for output in weights] or ["float"]
    assert len(set(kinds)) == 1, "both weights' gradients have one dtype"
    wanted, outputs = gpu.forms(d_qkv)
    constants = _head_constants(gpu.type_of(qkv), kinds[0], width, wanted, **about)
    parts = -(-rows // gpu.SUMS_ROWS)
    partial = gpu.room(scratch, gpu.sums_bytes(qkv.shape)) if weights else 0
    arguments = (*outputs, partial, *read, np.int64(rows))
    lanes, number = int(constants["LANES"]), int(constants["N"])
    across = -(-(qkv.shape[-1] // width) // max(1, min(TILE_WIDTH // number, WARP) // lanes))
    gpu.launch("qk_norm", "qk_norm_backward", parts * across, HEAD_THREADS, arguments, constants)
    if weights:
        last = (d_q_weight, d_k_weight, partial, np.int32(parts), gpu.adds(d_q_weight), gpu.adds(d_k_weight))
        gpu.launch("qk_norm", "sum_weights", 2 * -(-width // SUM_SIDE), gpu.SUM_THREADS, last, constants)


def _head_constants(
    kind: str,
    gradient: str,
    width: int,
    wanted: dict[str, int | str],
    *,
    num_heads: int,
    num_kv_heads: int,
    offset: float = 0.0,
) -> dict[str, int | str]:
    number = gpu.access(width, kind)
    lanes = 1 << (width // number - 1).bit_length()
    sizes = {"HQ": num_heads, "HKV": num_kv_heads, "HD": width, "N": number, "LANES": lanes}
    return {"T": kind, "G": gradient, **sizes, "OFFSET": int(offset), **wanted}
