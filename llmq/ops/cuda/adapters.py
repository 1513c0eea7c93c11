"""What adapters compute on the GPU.

See low_rank.cu, swiglu_low_rank.cu, scale_columns.cu, output_gain.cu, importance.cu and virtual_tokens.cu in cuda/.
"""

import math
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.activation import number_of
from llmq.ops.cuda.compile import Constants
from llmq.ops.seam import Arguments
from llmq.sites.lora import ONE_PASS, takes_one_pass
from llmq.tensor import num_norm_tiles

THREADS = 256  # of all but virtual_tokens.cu
VIRTUAL_THREADS = 128
TOKENS, COLUMNS = 64, 128  # low_rank.cu
HALF_COLUMNS = 64  # swiglu_low_rank.cu
IN_FLIGHT = 264  # blocks at least, if there is work for them: two to a multiprocessor of the largest GPUs
TILES = 8  # of tokens to a block, whose sums are in registers
STAGES = dict(zip(ONE_PASS, (4, 3), strict=True))  # of tiles in shared memory, which every GPU has room for
BLOCKS = dict(zip(ONE_PASS, (2, 1), strict=True))  # to a multiprocessor
HALF_TILES = 4  # the same of swiglu_low_rank.cu
HALF_STAGES = dict(zip(ONE_PASS, (3, 4), strict=True))  # or as many as there is room for
HALF_BLOCKS = dict(zip(ONE_PASS, (2, 1), strict=True))
FORWARD_ROWS = 32  # scale_columns.cu


def _low_rank_scratch(call: Arguments) -> int:
    columns, rank = call.reads["up"].shape
    return _parts_bytes(gpu.rows_of(call.reads["d_y"].shape), columns, rank, TILES, COLUMNS)


def _refuse_ranks(call: Arguments, capability: int) -> None:
    d_y, up = call.reads["d_y"], call.reads["up"]
    if not takes_one_pass(d_y.dtype, up.shape[-1], up.shape[0], d_y.width):
        raise UsageError(f"{up.name} of rank {up.shape[-1]} in {d_y.dtype} has no kernel of one pass")


@gpu.asks(_low_rank_scratch, _refuse_ranks)
def low_rank_backward(
    d_low: Output, d_up: Output, /, d_y: Tensor, low: Tensor, up: Tensor, *, alpha: float = 1.0, scratch: Any = None
) -> None:
    """d_low (...,R), d_up (N,R) <- d_y (...,N), low (...,R), up (N,R): alpha d_y up, alpha d_y^T low."""
    (columns, rank), rows = up.shape, gpu.rows_of(d_y.shape)
    assert takes_one_pass("bf16", rank, columns, _pitch(d_y), _pitch(low)) and d_low.wanted and d_up.wanted
    assert gpu.type_of(d_y, low, up, d_low) == "bf16" and not d_low.accumulate
    assert _pitch(low) == _pitch(d_low.tensors[0])
    groups, across, per_block = _blocks(rows, columns, TILES, COLUMNS)
    low_parts = gpu.room(scratch, _parts_bytes(rows, columns, rank, TILES, COLUMNS))
    up_parts = low_parts + 4 * across * rows * rank
    constants = _low_rank_constants(rank, d_up)
    sizes = (np.int32(rows), np.int32(columns), np.int32(across))
    read = (d_y, low, up, np.int64(_pitch(d_y)), np.int64(_pitch(low)))
    arguments = (low_parts, up_parts, *read, *sizes, np.int32(per_block))
    shared = STAGES[rank] * 2 * TOKENS * COLUMNS + 2 * TILES * TOKENS * rank + 4 * COLUMNS * rank
    gpu.launch("low_rank", "low_rank_backward", groups * across, THREADS, arguments, constants, shared_bytes=shared)
    _add_up(d_low, d_up, low_parts, up_parts, (rows, columns, across, groups), alpha)


def _halves_scratch(call: Arguments) -> int:
    columns, rank = call.reads["gate_b"].shape
    rows = gpu.rows_of(call.reads["d_act"].shape)
    return 2 * _parts_bytes(rows, columns, rank, HALF_TILES, HALF_COLUMNS)


@gpu.asks(_halves_scratch)
def swiglu_low_rank_backward(
    *operands: Any, gate_alpha: float, up_alpha: float, activation: str = "silu", scratch: Any = None
) -> None:
    """d_gate_up (...,2F), and of each half d_low (...,R) and d_b (F,R) <- d_act (...,F), gate_up (...,2F), low, b."""
    d_gate_up, d_gate_low, d_up_low, d_gate_b, d_up_b, *tensors = operands
    d_act, gate_up, gate_low, up_low, gate_b, up_b = tensors
    (columns, rank), rows, low_pitch = gate_b.shape, gpu.rows_of(d_act.shape), _pitch(gate_low)
    assert up_b.shape == gate_b.shape and takes_one_pass("bf16", rank, columns, low_pitch)
    assert _pitch(d_act) == columns and _pitch(gate_up) == 2 * columns
    assert gpu.type_of(*tensors, d_gate_up, d_gate_low, d_up_low) == "bf16"
    assert {_pitch(x) for x in (up_low, d_gate_low.tensors[0], d_up_low.tensors[0])} == {low_pitch}
    wanted, outputs = gpu.forms(d_gate_up)
    height = HALF_TILES
    groups, across, per_block = _blocks(rows, columns, height, HALF_COLUMNS)
    low_parts = gpu.room(scratch, 2 * _parts_bytes(rows, columns, rank, height, HALF_COLUMNS))
    up_parts = low_parts + 8 * across * rows * rank
    tile, rest = 6 * TOKENS * HALF_COLUMNS, 4 * height * TOKENS * rank + 8 * HALF_COLUMNS * rank
    stages = min(HALF_STAGES[rank], (gpu.shared_bytes_limit() - gpu.STATIC_BYTES - rest) // tile)
    shape = {"R": rank, "TILES": height, "STAGES": stages, "BLOCKS": HALF_BLOCKS[rank]}
    constants: Constants = {**wanted, **shape, "ACTIVATION": number_of(activation)}
    sizes = tuple(map(np.int32, (rows, columns, across, per_block)))
    arguments = (*outputs, low_parts, up_parts, *tensors, np.int64(low_pitch), *sizes)
    where = ("swiglu_low_rank", "swiglu_low_rank_backward", groups * across, THREADS)
    gpu.launch(*where, arguments, constants, shared_bytes=stages * tile + rest)
    of_each = ((d_gate_low, d_gate_b, gate_alpha), (d_up_low, d_up_b, up_alpha))
    for half, (d_low, d_b, alpha) in enumerate(of_each):
        parts = low_parts + half * 4 * across * rows * rank, up_parts + half * 4 * groups * columns * rank
        _add_up(d_low, d_b, *parts, (rows, columns, across, groups), alpha)


def _low_rank_constants(rank: int, d_up: Output) -> Constants:
    return {"G": gpu.type_of(d_up), "R": rank, "TILES": TILES, "STAGES": STAGES[rank], "BLOCKS": BLOCKS[rank]}


def _add_up(
    d_low: Output, d_up: Output, low_parts: int, up_parts: int, sizes: tuple[int, int, int, int], alpha: float
) -> None:
    """d_low and d_up <- alpha times the sums of their parts; `sizes` are M, N, parts of d_low and of d_up."""
    rows, columns, *parts = map(np.int32, sizes)
    low = d_low.tensors[0]
    rank = low.shape[-1]
    written = (d_low, d_up, low_parts, up_parts, np.int64(_pitch(low)), rows, columns, *parts)
    blocks = -(-(sizes[0] + sizes[1]) * rank // (4 * THREADS))
    arguments = (*written, np.float32(alpha), gpu.adds(d_up))
    gpu.launch("low_rank", "low_rank_sums", blocks, THREADS, arguments, _low_rank_constants(rank, d_up))


def _pitch(tensor: Tensor) -> int:
    """Numbers between the rows of a matrix, which may be columns of a wider one."""
    return tensor.array.strides[-2] // tensor.array.dtype.itemsize


def _blocks(rows: int, columns: int, height: int, width: int) -> tuple[int, int, int]:
    """Groups of `height` tiles of tokens, blocks side by side, and how many times `width` columns each of these has."""
    groups, count = -(-rows // (height * TOKENS)), -(-columns // width)
    per_block = -(-count // max(1, min(count, IN_FLIGHT // groups)))
    return groups, -(-count // per_block), per_block


def _parts_bytes(rows: int, columns: int, rank: int, height: int, width: int) -> int:
    groups, across, _ = _blocks(rows, columns, height, width)
    return 4 * rank * (across * rows + groups * columns)


def scale_columns_forward(y: Output, /, x: Tensor, gain: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """y (...,N) <- x (...,N), gain (N,) f32, bias (N,) or None, residual (...,N) or None: gain x + bias + residual."""
    rows, columns = gpu.rows_of(x.shape), x.shape[-1]
    assert gpu.type_of(gain) == "float", "a gain is held in f32"
    arguments = (y, x, gain, bias, residual, np.int64(rows))
    constants, across = _column_constants(gpu.type_of(y, x, bias, residual), columns)
    blocks = across * -(-rows // FORWARD_ROWS)
    gpu.launch("scale_columns", "scale_columns_forward", blocks, gpu.TILE_THREADS, arguments, constants)


@gpu.asks(lambda call: gpu.sums_bytes(call.reads["x"].shape))
def scale_columns_backward(
    d_x: Output, d_gain: Output, /, d_y: Tensor, x: Tensor, gain: Tensor, *, scratch: Any = None
) -> None:
    """d_x (...,N), d_gain (N,) <- d_y (...,N), x (...,N), gain (N,) f32."""
    rows, columns = gpu.rows_of(x.shape), x.shape[-1]
    assert gpu.type_of(gain) == "float", "a gain is held in f32"
    wanted, outputs = gpu.forms(d_x)
    parts = -(-rows // gpu.SUMS_ROWS)
    partial = gpu.room(scratch, gpu.sums_bytes(x.shape)) if d_gain.wanted else 0
    constants, across = _column_constants(gpu.type_of(d_y, x, d_x), columns, **wanted)
    arguments = (*outputs, partial, d_y, x, gain, np.int64(rows))
    gpu.launch("scale_columns", "scale_columns_backward", across * parts, gpu.TILE_THREADS, arguments, constants)
    if d_gain.wanted:
        summed = (d_gain, partial, np.int32(parts), np.int32(columns), gpu.adds(d_gain))
        named: Constants = {"T": "float", "G": gpu.type_of(d_gain), "C": 4, "N": 4, "FORMS": 0, "E4M3": 0}
        gpu.launch("scale_columns", "scale_columns_sum", -(-columns // gpu.SUM_COLUMNS), gpu.SUM_THREADS, summed, named)


def _column_constants(kind: str, columns: int, **wanted: int | str) -> tuple[Constants, int]:
    """Constants of a kernel, and blocks side by side."""
    number = gpu.access(columns, kind)
    across = -(-columns // (128 if number > 4 else 32 * number))
    return {"T": kind, "G": "float", "C": columns, "N": number, "FORMS": 0, "E4M3": 0, **wanted}, across


def output_gain(gain: Output, norm: Output, /, *read: Any, scale: float, first: int) -> None:
    """gain (N,), norm (N,) <- weight (N,K), through (N,S), gram (S,S), up (N,R), magnitude (N,), or None."""
    weight, through, gram, up, magnitude = read
    (rows,), kind = gain.shape, "float" if weight is None else gpu.type_of(weight, up)
    rank, width = 1 if up is None else up.shape[-1], 4 if weight is None else weight.shape[-1]
    assert gpu.type_of(gain, through, gram, magnitude) == "float"
    every = 1 if gram is None else gram.shape[-1]
    numbers = (np.float32(scale), np.int32(first), np.int32(every), np.int32(rows))
    constants: Constants = {"T": kind, "G": "float", "K": width, "R": rank, "N": gpu.access(width, kind)}
    blocks = -(-rows * 32 // THREADS)
    gpu.launch("output_gain", "output_gain", blocks, THREADS, (gain, norm, *read, *numbers), constants)


def output_gain_backward(d_magnitude: Output, /, d_gain: Tensor, norm: Tensor | None) -> None:
    """d_magnitude (N,) <- d_gain (N,), norm (N,) or None: d_gain / norm."""
    (rows,) = d_gain.shape
    arguments = (d_magnitude, d_gain, norm, np.int32(rows), gpu.adds(d_magnitude))
    constants: Constants = {"T": "float", "G": gpu.type_of(d_magnitude), "K": 4, "R": 1, "N": 4}
    gpu.launch("output_gain", "output_gain_backward", -(-rows // THREADS), THREADS, arguments, constants)


def orthogonality(
    coefficient: Output, /, gram: Tensor, targets: Tensor, *, weight: float, first: int, present: int
) -> None:
    """coefficient (R,S) <- gram (S,S) f32, targets (B,T) int32: 2 weight n (G - I) / |G - I|, and 0 beside it."""
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
    constants: Constants = {"T": "float", "G": "float"}
    shape = sensitivity.shape
    rows, columns = (gpu.rows_of(shape), shape[-1]) if len(shape) > 1 else (shape[0], 1)
    arguments = (sums, sensitivity, uncertainty, np.int32(rows), np.int32(columns))
    if of_columns:
        gpu.launch("importance", "importance_of_columns", num_norm_tiles(shape), THREADS, arguments, constants)
    else:
        gpu.launch("importance", "importance_of_rows", -(-rows * 32 // THREADS), THREADS, arguments, constants)


def virtual_tokens_forward(
    out: Output, /, x: Tensor, virtual: Tensor, positions: Tensor, *, num_virtual: int, channels: int, start: int = 0
) -> None:
    """out (B,T,W) <- x (B,T,W), virtual (N,D) of the same dtype, positions (B,T) int32."""
    assert gpu.type_of(virtual, x) and virtual.shape == (num_virtual, channels)
    _replace(out, x, virtual, positions, {"VIRTUAL": num_virtual, "START": start, "CHANNELS": channels})


def _refuse_many(call: Arguments, capability: int) -> None:
    gpu.at_most(gpu.GRID_SIDE, call.numbers["num_virtual"], "virtual tokens", "an adapter", "fewer")


@gpu.asks(refuse=_refuse_many)
def virtual_tokens_backward(
    d_x: Output,
    d_virtual: Output,
    /,
    d_out: Tensor,
    positions: Tensor,
    *,
    num_virtual: int,
    channels: int,
    start: int = 0,
) -> None:
    """d_x (B,T,W), d_virtual (N,D) <- d_out (B,T,W), positions (B,T) int32."""
    place: Constants = {"VIRTUAL": num_virtual, "START": start, "CHANNELS": channels}
    if d_virtual.wanted:
        constants = _virtual_constants(d_out, channels, {**place, "G": gpu.type_of(d_virtual)})
        number = int(constants["N"])
        arguments = (d_virtual, d_out, positions, np.int32(gpu.rows_of(d_out.shape)), gpu.adds(d_virtual))
        grid = (-(-channels // (VIRTUAL_THREADS * number)), num_virtual)
        gpu.launch("virtual_tokens", "virtual_tokens_sum", grid, VIRTUAL_THREADS, arguments, constants)
    _replace(d_x, d_out, None, positions, place)


def _replace(out: Output, x: Tensor, matrix: Tensor | None, positions: Tensor, place: Constants) -> None:
    """Rows of the matrix, or zeros, in place of virtual tokens."""
    if not out.wanted:
        return
    assert gpu.type_of(out, x)
    rows, is_in_place = gpu.rows_of(x.shape), gpu.plain(out) == gpu.pointer(x)
    constants = _virtual_constants(x, int(place["CHANNELS"]), {**place, "IN_PLACE": int(is_in_place)})
    arguments, blocks = (out, x, matrix, positions, np.int32(rows)), -(-rows * 32 // VIRTUAL_THREADS)
    gpu.launch("virtual_tokens", "virtual_tokens", blocks, VIRTUAL_THREADS, arguments, constants)


def _virtual_constants(x: Tensor, channels: int, others: Constants) -> Constants:
    kind, width = gpu.type_of(x), x.shape[-1]
    number = gpu.access(math.gcd(width, channels), kind)
    return {"T": kind, "G": "float", "IN_PLACE": 0, "W": width, "N": number, **others}
