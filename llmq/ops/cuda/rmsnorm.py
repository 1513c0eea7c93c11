"""RMSNorm on the GPU; see cuda/rmsnorm.cu."""

from __future__ import annotations

import numpy as np

from llmq.ops.cuda.launch import (
    COL,
    SUM_COLUMNS,
    SUM_THREADS,
    SUMS,
    access,
    adds,
    capability,
    forms,
    launch,
    plain,
    pointer,
    rows_of,
    type_of,
)
from llmq.ops.cuda.scratch import take
from llmq.tensor import Output, Tensor

PARTS = 512  # blocks of the backward pass, and partial rows of the weight's gradient: about 4 blocks per multiprocessor
HELD = 4  # accesses of a row that a lane holds at most
SMALL = (86, 89, 120, 121)  # cards with 100 KiB of shared memory to a multiprocessor, and not 164 or more
TILE_BYTES = {True: 96 * 1024, False: 113 * 1024}  # of shared memory for the transposed form: at least one block


def rmsnorm_forward(x: Output, rstd: Output, /, res: Tensor, weight: Tensor, *, eps: float) -> None:
    """x (B,T,C), rstd (B,T) <- res (B,T,C), weight (C,)."""
    kind, rows = type_of(res), rows_of(res.shape)
    assert type_of(weight) == type_of(x) == kind, "a norm computes in one dtype"
    wanted, outputs = forms(x)
    constants = {**_constants(kind, "float", res.shape[-1], wanted, 16), "RESIDUAL": 0}
    threads, per_block = _threads(constants), int(constants["ROWS"])
    arguments = (*outputs, plain(rstd), pointer(res), pointer(weight), np.float32(eps), np.int64(rows))
    shared = _tile_bytes(constants)
    launch("rmsnorm", "rmsnorm_forward", -(-rows // per_block), threads, arguments, constants, shared_bytes=shared)


def rmsnorm_backward(
    d_out: Output, d_weight: Output, /, d_x: Tensor, d_res: Tensor | None, res: Tensor, weight: Tensor, rstd: Tensor
) -> None:
    """d_out (B,T,C), d_weight (C,) <- d_x (B,T,C), d_res (B,T,C) or None, res (B,T,C), weight (C,), rstd (B,T)."""
    kind, columns, rows = type_of(res), res.shape[-1], rows_of(res.shape)
    gradient = type_of(d_weight) if d_weight.wanted else "float"
    wanted, outputs = forms(d_out)
    constants = {**_constants(kind, gradient, columns, wanted, 4), "RESIDUAL": int(d_res is not None)}
    per_block = _rows_per_part(rows)
    parts = -(-rows // per_block)
    partial = take(parts * columns * 4) if d_weight.wanted else 0
    read = (pointer(d_x), pointer(d_res), pointer(res), pointer(weight), pointer(rstd))
    arguments = (*outputs, partial, *read, np.int32(per_block), np.int64(rows))
    shared = _tile_bytes(constants)
    launch("rmsnorm", "rmsnorm_backward", parts, _threads(constants), arguments, constants, shared_bytes=shared)
    if d_weight.wanted:
        last = (plain(d_weight), partial, np.int32(parts), adds(d_weight))
        launch("rmsnorm", "sum_weight", -(-columns // SUM_COLUMNS), SUM_THREADS, last, constants)


def rmsnorm_backward_scratch(res: tuple[int, ...]) -> int:
    """Bytes of scratch for this shape."""
    rows = rows_of(res)
    return -(-rows // _rows_per_part(rows)) * res[-1] * 4


def _rows_per_part(rows: int) -> int:
    """Rows of one block: a multiple of the 32 rows of a tile, so that parts do not depend on the forms."""
    return max(32, -(-rows // (PARTS * 32)) * 32)


def _constants(
    kind: str, gradient: str, columns: int, wanted: dict[str, int | str], warps: int
) -> dict[str, int | str]:
    """`warps` of a block that transposes: more hide more latency, but the backward pass needs their registers."""
    assert not int(wanted["FORMS"]) & SUMS, "nobody reads column sums of what a norm writes"
    number = access(columns, kind)
    accesses = columns // number
    group = -(-accesses // (32 * HELD))
    assert group <= 32, f"hidden size {columns} is too wide for one block"
    groups = rows = max(1, 4 // group)
    if int(wanted["FORMS"]) & COL:
        groups, rows = max(1, warps // group), 32 if 32 * _pitch(columns) <= TILE_BYTES[capability() in SMALL] else 16
    held = -(-accesses // (32 * group))
    sizes = {"C": columns, "N": number, "GROUP": group, "VPT": held, "GROUPS": groups, "ROWS": rows}
    return {"T": kind, "G": gradient, **sizes, **wanted}


def _threads(constants: dict[str, int | str]) -> int:
    return 32 * int(constants["GROUP"]) * int(constants["GROUPS"])


def _pitch(columns: int) -> int:
    return -(-columns // 8) * 8 + 4


def _tile_bytes(constants: dict[str, int | str]) -> int:
    return int(constants["ROWS"]) * _pitch(int(constants["C"])) if int(constants["FORMS"]) & COL else 0
