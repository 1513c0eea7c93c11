"""Both gradients of an adapter's B on the GPU, in one pass over d_y; see cuda/low_rank.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.ops.cuda.compile import Constants
from llmq.ops.cuda.launch import Kernel, adds, launch, plain, pointer, room, rows_of, type_of
from llmq.ops.seam import Arguments
from llmq.tensor import Output, Tensor

THREADS, TOKENS, COLUMNS = 256, 128, 64  # low_rank.cu
TILES = 4  # of tokens to a block, whose sums are in registers
WIDTH = 8  # numbers that are copied at a time: what places and widths are multiples of
IN_FLIGHT = 264  # blocks at least, if there is work for them: two to a multiprocessor of the largest GPUs
STAGES = {16: 4, 32: 3}  # by rank: of tiles in shared memory, of which every GPU has room for so many
BLOCKS = {16: 2, 32: 1}  # to a multiprocessor


def takes(dtype: str, rank: int, *places: int) -> bool:
    """Whether the kernel takes adapters of this rank in `dtype`, whose columns begin and end at `places`."""
    return dtype == "bf16" and rank in STAGES and not any(place % WIDTH for place in places)


def low_rank_backward(
    d_low: Output, d_up: Output, /, d_y: Tensor, low: Tensor, up: Tensor, *, alpha: float = 1.0, scratch: Any = None
) -> None:
    """d_low (...,R), d_up (N,R) <- d_y (...,N), low (...,R), up (N,R): alpha d_y up, alpha d_y^T low."""
    (columns, rank), rows = up.shape, rows_of(d_y.shape)
    assert takes("bf16", rank, columns, _pitch(d_y), _pitch(low)) and d_low.wanted and d_up.wanted
    assert {type_of(x) for x in (d_y, low, up, d_low)} == {"bf16"} and not d_low.accumulate
    assert _pitch(low) == _pitch(d_low.tensors[0])
    groups, across, per_block = _blocks(rows, columns)
    low_parts = room(scratch, _scratch_bytes(rows, columns, rank))
    up_parts = low_parts + 4 * across * rows * rank
    shape: Constants = {"R": rank, "TILES": TILES, "STAGES": STAGES[rank], "BLOCKS": BLOCKS[rank]}
    constants: Constants = {"G": type_of(d_up), **shape}
    sizes = (np.int32(rows), np.int32(columns), np.int32(across))
    read = (*map(pointer, (d_y, low, up)), np.int64(_pitch(d_y)), np.int64(_pitch(low)))
    arguments = (low_parts, up_parts, *read, *sizes, np.int32(per_block))
    shared = STAGES[rank] * 2 * TOKENS * COLUMNS + 2 * TILES * TOKENS * rank + 8 * COLUMNS * rank
    launch("low_rank", "low_rank_backward", groups * across, THREADS, arguments, constants, shared_bytes=shared)
    written = (plain(d_low), plain(d_up), low_parts, up_parts, np.int64(_pitch(low)), *sizes)
    arguments = (*written, np.int32(groups), np.float32(alpha), adds(d_up))
    launch("low_rank", "low_rank_sums", -(-(rows + columns) * rank // (4 * THREADS)), THREADS, arguments, constants)


def _pitch(tensor: Tensor) -> int:
    """Numbers between the rows of a matrix, which may be columns of a wider one."""
    return tensor.array.strides[-2] // tensor.array.dtype.itemsize


def _blocks(rows: int, columns: int) -> tuple[int, int, int]:
    """Groups of tokens, blocks side by side, and blocks of columns that each of these has."""
    groups, count = -(-rows // (TILES * TOKENS)), -(-columns // COLUMNS)
    per_block = -(-count // max(1, min(count, IN_FLIGHT // groups)))
    return groups, -(-count // per_block), per_block


def _scratch_bytes(rows: int, columns: int, rank: int) -> int:
    groups, across, _ = _blocks(rows, columns)
    return 4 * rank * (across * rows + groups * columns)


def _scratch(call: Arguments) -> int:
    columns, rank = call.reads["up"].shape
    return _scratch_bytes(rows_of(call.reads["d_y"].shape), columns, rank)


def _refuse(call: Arguments, capability: int) -> None:
    d_y, up = call.reads["d_y"], call.reads["up"]
    if not takes(d_y.dtype, up.shape[-1], up.shape[0], d_y.pitch or d_y.shape[-1]):
        raise UsageError(f"{up.name} of rank {up.shape[-1]} in {d_y.dtype} has no kernel of one pass")


KERNELS = (Kernel(low_rank_backward, _scratch, _refuse),)
