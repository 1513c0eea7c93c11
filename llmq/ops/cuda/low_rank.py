"""Both gradients of adapters' B on the GPU, in one pass over d_y; see cuda/low_rank.cu and cuda/swiglu_low_rank.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants
from llmq.ops.seam import Arguments
from llmq.sites.lora import ONE_PASS, takes_one_pass

THREADS, TOKENS, COLUMNS = 256, 64, 128  # low_rank.cu
HALF_COLUMNS = 64  # swiglu_low_rank.cu
IN_FLIGHT = 264  # blocks at least, if there is work for them: two to a multiprocessor of the largest GPUs
TILES = 8  # of tokens to a block, whose sums are in registers
STAGES = dict(zip(ONE_PASS, (4, 3), strict=True))  # of tiles in shared memory, which every GPU has room for
BLOCKS = dict(zip(ONE_PASS, (2, 1), strict=True))  # to a multiprocessor
HALF_TILES = 4  # the same of swiglu_low_rank.cu
HALF_STAGES = dict(zip(ONE_PASS, (3, 4), strict=True))  # or as many as there is room for
HALF_BLOCKS = dict(zip(ONE_PASS, (2, 1), strict=True))


def low_rank_backward(
    d_low: Output, d_up: Output, /, d_y: Tensor, low: Tensor, up: Tensor, *, alpha: float = 1.0, scratch: Any = None
) -> None:
    """d_low (...,R), d_up (N,R) <- d_y (...,N), low (...,R), up (N,R): alpha d_y up, alpha d_y^T low."""
    (columns, rank), rows = up.shape, gpu.rows_of(d_y.shape)
    assert takes_one_pass("bf16", rank, columns, _pitch(d_y), _pitch(low)) and d_low.wanted and d_up.wanted
    assert {gpu.type_of(x) for x in (d_y, low, up, d_low)} == {"bf16"} and not d_low.accumulate
    assert _pitch(low) == _pitch(d_low.tensors[0])
    groups, across, per_block = _blocks(rows, columns, TILES, COLUMNS)
    low_parts = gpu.room(scratch, _scratch_bytes(rows, columns, rank, TILES, COLUMNS))
    up_parts = low_parts + 4 * across * rows * rank
    constants = _constants(rank, d_up)
    sizes = (np.int32(rows), np.int32(columns), np.int32(across))
    read = (d_y, low, up, np.int64(_pitch(d_y)), np.int64(_pitch(low)))
    arguments = (low_parts, up_parts, *read, *sizes, np.int32(per_block))
    shared = STAGES[rank] * 2 * TOKENS * COLUMNS + 2 * TILES * TOKENS * rank + 4 * COLUMNS * rank
    gpu.launch("low_rank", "low_rank_backward", groups * across, THREADS, arguments, constants, shared_bytes=shared)
    _add_up(d_low, d_up, low_parts, up_parts, (rows, columns, across, groups), alpha)


def swiglu_low_rank_backward(*operands: Any, gate_alpha: float, up_alpha: float, scratch: Any = None) -> None:
    """d_gate_up (...,2F), and of each half d_low (...,R) and d_b (F,R) <- d_act (...,F), gate_up (...,2F), low, b."""
    d_gate_up, d_gate_low, d_up_low, d_gate_b, d_up_b, *tensors = operands
    d_act, gate_up, gate_low, up_low, gate_b, up_b = tensors
    (columns, rank), rows, low_pitch = gate_b.shape, gpu.rows_of(d_act.shape), _pitch(gate_low)
    assert up_b.shape == gate_b.shape and takes_one_pass("bf16", rank, columns, low_pitch)
    assert _pitch(d_act) == columns and _pitch(gate_up) == 2 * columns
    assert {gpu.type_of(x) for x in (*tensors, d_gate_up, d_gate_low, d_up_low)} == {"bf16"}
    assert {_pitch(x) for x in (up_low, d_gate_low.tensors[0], d_up_low.tensors[0])} == {low_pitch}
    wanted, outputs = gpu.forms(d_gate_up)
    height = HALF_TILES
    groups, across, per_block = _blocks(rows, columns, height, HALF_COLUMNS)
    low_parts = gpu.room(scratch, 2 * _scratch_bytes(rows, columns, rank, height, HALF_COLUMNS))
    up_parts = low_parts + 8 * across * rows * rank
    tile, rest = 6 * TOKENS * HALF_COLUMNS, 4 * height * TOKENS * rank + 8 * HALF_COLUMNS * rank
    stages = min(HALF_STAGES[rank], (gpu.shared_bytes_limit() - gpu.STATIC_BYTES - rest) // tile)
    constants: Constants = {**wanted, "R": rank, "TILES": height, "STAGES": stages, "BLOCKS": HALF_BLOCKS[rank]}
    sizes = tuple(map(np.int32, (rows, columns, across, per_block)))
    arguments = (*outputs, low_parts, up_parts, *tensors, np.int64(low_pitch), *sizes)
    where = ("swiglu_low_rank", "swiglu_low_rank_backward", groups * across, THREADS)
    gpu.launch(*where, arguments, constants, shared_bytes=stages * tile + rest)
    of_each = ((d_gate_low, d_gate_b, gate_alpha), (d_up_low, d_up_b, up_alpha))
    for half, (d_low, d_b, alpha) in enumerate(of_each):
        parts = low_parts + half * 4 * across * rows * rank, up_parts + half * 4 * groups * columns * rank
        _add_up(d_low, d_b, *parts, (rows, columns, across, groups), alpha)


def _constants(rank: int, d_up: Output) -> Constants:
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
    gpu.launch("low_rank", "low_rank_sums", blocks, THREADS, arguments, _constants(rank, d_up))


def _pitch(tensor: Tensor) -> int:
    """Numbers between the rows of a matrix, which may be columns of a wider one."""
    return tensor.array.strides[-2] // tensor.array.dtype.itemsize


def _blocks(rows: int, columns: int, height: int, width: int) -> tuple[int, int, int]:
    """Groups of `height` tiles of tokens, blocks side by side, and how many times `width` columns each of these has."""
    groups, count = -(-rows // (height * TOKENS)), -(-columns // width)
    per_block = -(-count // max(1, min(count, IN_FLIGHT // groups)))
    return groups, -(-count // per_block), per_block


def _scratch_bytes(rows: int, columns: int, rank: int, height: int, width: int) -> int:
    groups, across, _ = _blocks(rows, columns, height, width)
    return 4 * rank * (across * rows + groups * columns)


def _scratch(call: Arguments) -> int:
    columns, rank = call.reads["up"].shape
    return _scratch_bytes(gpu.rows_of(call.reads["d_y"].shape), columns, rank, TILES, COLUMNS)


def _scratch_of_halves(call: Arguments) -> int:
    columns, rank = call.reads["gate_b"].shape
    rows = gpu.rows_of(call.reads["d_act"].shape)
    return 2 * _scratch_bytes(rows, columns, rank, HALF_TILES, HALF_COLUMNS)


def _refuse(call: Arguments, capability: int) -> None:
    d_y, up = call.reads["d_y"], call.reads["up"]
    if not takes_one_pass(d_y.dtype, up.shape[-1], up.shape[0], d_y.width):
        raise UsageError(f"{up.name} of rank {up.shape[-1]} in {d_y.dtype} has no kernel of one pass")


KERNELS = (gpu.Kernel(low_rank_backward, _scratch, _refuse), gpu.Kernel(swiglu_low_rank_backward, _scratch_of_halves))
