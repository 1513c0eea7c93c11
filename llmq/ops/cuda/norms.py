"""Norms on the GPU, of rows and of heads; see rmsnorm, post_norm, layernorm, qk_norm and wide_qk_norm in cuda/."""

import math
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
WIDE_WEIGHTS = ("q_weight", "k_weight")
WIDE_THREADS, WIDEST = 512, 64  # wide_qk_norm.cu: of a block at most, and sums that one of them keeps
HEAD_THREADS, HEAD_WARPS, STEPS, TILE_WIDTH, WARP, SUM_SIDE = 256, 8, 2, 128, 32, 8  # qk_norm.cu


def _refuse(call: Arguments, capability: int) -> None:
    """UsageError for rows that no block holds, or, to be written as fp8 columns, no block of a card's shared memory."""
    offset_of(call)
    res, room = call.reads["res" if "res" in call.reads else "x"], gpu.shared_bytes_limit(capability) - gpu.STATIC_BYTES
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
    _forward("rmsnorm", x, (rstd,), (res, weight), eps, OFFSET=int(offset))


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
    _backward("rmsnorm", d_out, (d_weight,), (d_x, d_res, res, weight, rstd), scratch, OFFSET=int(offset))


@gpu.asks(refuse=_refuse)
def post_norm_forward(
    out: Output, rstd: Output, /, x: Tensor, weight: Tensor, residual: Tensor, *, eps: float, offset: float = 0.0
) -> None:
    """out (B,T,C), rstd (B,T) <- x (B,T,C), weight (C,), residual (B,T,C)."""
    _forward("post_norm", out, (rstd,), (x, weight, residual), eps, OFFSET=int(offset))


@gpu.asks(refuse=_refuse)
def layernorm_forward(
    x: Output, mean: Output, rstd: Output, /, res: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> None:
    """x (B,T,C), mean, rstd (B,T) <- res (B,T,C), weight (C,), bias (C,) or None."""
    _forward("layernorm", x, (mean, rstd), (res, weight, bias), eps, BIAS=int(bias is not None))


@gpu.asks(lambda call: _scratch_bytes(call.reads["res"].shape, 1 + bool(call.writes.get("d_bias"))), _refuse)
def layernorm_backward(
    d_out: Output,
    d_weight: Output,
    d_bias: Output,
    /,
    d_x: Tensor,
    d_res: Tensor | None,
    res: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    scratch: Any = None,
) -> None:
    """d_out (B,T,C), d_weight, d_bias (C,) <- d_x, d_res (B,T,C) or None, res, weight (C,), mean, rstd (B,T)."""
    gradients, read = (d_weight, d_bias), (d_x, d_res, res, weight, mean, rstd)
    _backward("layernorm", d_out, gradients, read, scratch, BIAS=int(d_bias.wanted))


def _forward(
    source: str, x: Output, stats: tuple[Output, ...], read: tuple[Tensor | None, ...], eps: float, **about: int
) -> None:
    """The kernel of `source` that writes x and what backward needs; the first read has its rows."""
    assert read[0] is not None
    kind, shape = gpu.type_of(*read, x), read[0].shape
    wanted, outputs = gpu.forms(x, may_be_cut=True)
    constants = {**_constants(kind, "float", shape[-1], wanted, forward=True), "RESIDUAL": 0, **about}
    rows = gpu.rows_of(shape)
    arguments = (*outputs, *stats, *read, np.float32(eps), np.int64(rows), np.int64(gpu.height(x)))
    _launch(source, f"{source}_forward", -(-rows // int(constants["ROWS"])), arguments, constants)


def _backward(
    source: str,
    d_out: Output,
    gradients: tuple[Output, ...],
    read: tuple[Tensor | None, ...],
    scratch: Any,
    **about: int,
) -> None:
    """The kernel of `source` that writes d_out and partial sums, and the sums of these that are wanted."""
    _, d_res, res, *_ = read
    assert res is not None
    kind, columns, rows = gpu.type_of(res), res.shape[-1], gpu.rows_of(res.shape)
    sums = [(place, gradient) for place, gradient in enumerate(gradients) if gradient.wanted]
    kinds = {gpu.type_of(gradient) for _, gradient in sums} or {"float"}
    assert len(kinds) == 1, "gradients of a weight and of a bias have one dtype"
    wanted, outputs = gpu.forms(d_out, may_be_cut=True)
    shape = _constants(kind, kinds.pop(), columns, wanted, forward=False, centered="BIAS" in about)
    constants = {**shape, "RESIDUAL": int(d_res is not None), **about}
    per_block = _rows_per_part(rows)
    parts = -(-rows // per_block)
    partial = gpu.room(scratch, _scratch_bytes(res.shape, 1 + about.get("BIAS", 0))) if sums else 0
    arguments = (*outputs, partial, *read, np.int32(per_block), np.int64(rows), np.int64(gpu.height(d_out)))
    _launch(source, f"{source}_backward", parts, arguments, constants)
    for place, gradient in sums:
        last = (gradient, partial + 4 * place * parts * columns, np.int32(parts), gpu.adds(gradient))
        gpu.launch(source, "sum_weight", -(-columns // gpu.SUM_COLUMNS), gpu.SUM_THREADS, last, constants)


def _launch(source: str, entry: str, blocks: int, arguments: tuple[Any, ...], constants: dict[str, int | str]) -> None:
    """A kernel with a group of warps to each row at a time, and a tile of rows where columns are written."""
    threads = 32 * int(constants["GROUP"]) * int(constants["GROUPS"])
    tile = int(constants["ROWS"]) * _pitch(int(constants["C"])) if int(constants["FORMS"]) & gpu.COL else 0
    gpu.launch(source, entry, blocks, threads, arguments, constants, shared_bytes=tile)


def _scratch_bytes(res: tuple[int, ...], sums: int = 1) -> int:
    """Bytes of scratch for this shape, with this many sums of each column."""
    rows = gpu.rows_of(res)
    return -(-rows // _rows_per_part(rows)) * res[-1] * 4 * sums


def _rows_per_part(rows: int) -> int:
    """Rows of one block: a multiple of a tile's, so that parts do not depend on the forms."""
    return max(TALL, -(-rows // (PARTS * TALL)) * TALL)


def _constants(
    kind: str, gradient: str, columns: int, wanted: dict[str, int | str], *, forward: bool, centered: bool = False
) -> dict[str, int | str]:
    assert not int(wanted["FORMS"]) & gpu.SUMS, "column sums of what a norm writes are never read"
    transposed, number = bool(int(wanted["FORMS"]) & gpu.COL), gpu.access(columns, kind)
    accesses = columns // number
    group = -(-accesses // (32 * HELD))
    warps, blocks, ahead = _shape_of_centered(group) if centered else _shape(group, forward, transposed)
    groups = rows = max(1, warps // group)
    if transposed:
        limit = gpu.shared_bytes_limit() - gpu.STATIC_BYTES
        heights = ((TALL, limit // 2), (MIDDLE, limit), (LOW, limit))  # rows, and bytes that a block may have
        rows = next(rows for rows, room in heights if rows * _pitch(columns) <= room)
    held = -(-accesses // (32 * group))
    sizes = {"C": columns, "N": number, "GROUP": group, "VPT": held, "GROUPS": groups, "ROWS": rows}
    return {"T": kind, "G": gradient, **sizes, "BLOCKS": blocks, "AHEAD": ahead, **wanted}


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


def _shape_of_centered(group: int) -> tuple[int, int, int]:
    """As `_shape`, backward: sums for a bias are as many registers more. Of whether it is wanted nothing depends."""
    warps = 4 * group if group < 3 else 2 * group if group < 5 else group
    return warps, max(1, 10 // warps), 0


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


def _wide_constants(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, gradient: str) -> dict[str, int | str]:
    queries, keys, kind = q_weight.shape[-1], k_weight.shape[-1], gpu.type_of(qkv, q_weight, k_weight)
    number = gpu.access(math.gcd(queries, keys), kind)
    threads = min(WIDE_THREADS, -(-(queries + keys) // (32 * number)) * 32)
    return {"T": kind, "G": gradient, "Q": queries, "K": keys, "N": number, "THREADS": threads}


def _refuse_wide(call: Arguments, capability: int) -> None:
    """UsageError for queries and keys whose weights' gradients no block holds."""
    widths = [call.reads[name].shape[-1] for name in WIDE_WEIGHTS]
    gpu.access(math.gcd(*widths), gpu.kind_of(call.reads["qkv"].dtype, call.reads["qkv"].name))
    if sum(widths) > WIDE_THREADS * WIDEST:
        raise UsageError(
            f"queries and keys of {sum(widths)} numbers are more than the {WIDE_THREADS * WIDEST} that the GPU "
            f"normalises at a time: use --device cpu"
        )


def _wide_scratch_bytes(call: Arguments) -> int:
    rows, widths = gpu.rows_of(call.reads["qkv"].shape), [call.reads[name].shape[-1] for name in WIDE_WEIGHTS]
    return 4 * -(-rows // _rows_per_part(rows)) * sum(widths)


@gpu.asks(refuse=_refuse_wide)
def wide_qk_norm_forward(out: Output, rstd: Output, /, *read: Tensor, eps: float, **heads: int) -> None:
    """out (B,T,(Hq+2Hkv)*Hd), rstd (B,T,2) <- qkv like out, q_weight (Hq*Hd,), k_weight (Hkv*Hd,)."""
    qkv, q_weight, k_weight = read
    constants = _wide_constants(qkv, q_weight, k_weight, "float")
    where = ("wide_qk_norm", "wide_qk_norm_forward", gpu.rows_of(qkv.shape), int(constants["THREADS"]))
    gpu.launch(*where, (out, rstd, *read, np.float32(eps)), constants)


@gpu.asks(_wide_scratch_bytes, _refuse_wide)
def wide_qk_norm_backward(
    d_qkv: Output, d_q_weight: Output, d_k_weight: Output, /, *read: Tensor, scratch: Any = None, **heads: int
) -> None:
    """d_qkv (B,T,(Hq+2Hkv)*Hd), d_q_weight (Hq*Hd,), d_k_weight (Hkv*Hd,) <- d_out, qkv like d_qkv, weights, rstd."""
    _, qkv, q_weight, k_weight, _ = read
    weights = [output for output in (d_q_weight, d_k_weight) if output.wanted]
    kinds = {gpu.type_of(output) for output in weights} or {"float"}
    assert len(kinds) == 1, "both weights' gradients have one dtype"
    constants, rows = _wide_constants(qkv, q_weight, k_weight, kinds.pop()), gpu.rows_of(qkv.shape)
    per_block = _rows_per_part(rows)
    parts, queries, keys = -(-rows // per_block), q_weight.shape[-1], k_weight.shape[-1]
    partial = gpu.room(scratch, 4 * parts * (queries + keys)) if weights else 0
    arguments = (d_qkv, partial, *read, np.int32(per_block), np.int64(rows))
    gpu.launch("wide_qk_norm", "wide_qk_norm_backward", parts, int(constants["THREADS"]), arguments, constants)
    for output, width, first in ((d_q_weight, queries, 0), (d_k_weight, keys, 4 * parts * queries)):
        if output.wanted:
            last = (output, partial + first, np.int32(parts), np.int32(width), gpu.adds(output))
            gpu.launch("wide_qk_norm", "sum_weight", -(-width // gpu.SUM_COLUMNS), gpu.SUM_THREADS, last, constants)
