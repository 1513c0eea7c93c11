"""Copies in 8 and 4 bits with scales of their own on the GPU; see quantize.cu and pack.cu in cuda/."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.cast import amax_scale
from llmq.ops.cuda.compile import Constants
from llmq.ops.cuda.pack import FORMATS, pack
from llmq.scaling import BLOCK

THREADS, HELD_PACKS = 256, 8  # quantize.cu
PER = {"blockwise": 0, "tilewise": 1, "rowwise": 2}  # of the kernel over tiles, where "rowwise" is a column's
AMAX_ROWS = 8 * BLOCK  # that a block of column_amax reads
SCRATCH_BYTES = 4  # the largest magnitude


def quantize(out: Output, scale: Output, /, x: Tensor, *, limit: float, scratch: Any = None) -> None:
    """out, in every wanted form with its scales, and scale (1,) <- x (the shape of out)."""
    copies = {_place(tensor): tensor for tensor in out.tensors}
    by_rows = copies.pop(("rowwise", "row"), None)
    if by_rows is not None:
        _rows(out, scale, by_rows, x, limit, scratch)
    elif scale.wanted:
        amax_scale(scale, x, limit=limit)
    for scaling in FORMATS:
        if (packed := copies.pop((scaling, "row"), None)) is not None:
            pack(out, packed, x)
    for scaling in PER:
        row, col = (copies.pop((scaling, layout), None) for layout in ("row", "col"))
        if row is not None or col is not None:
            _tiles(out, scaling, row, col, x)
    assert not copies, f"{out.name}: two copies in one place, or not quantized: {sorted(copies)}"


def _place(tensor: Tensor) -> tuple[str, str]:
    assert tensor.form is not None and tensor.form.scaling is not None, f"{tensor.name} is not quantized"
    return tensor.form.scaling, tensor.form.layout


def _constants(out: Output, x: Tensor, copy: Tensor, forms: int, scaling: str) -> Constants:
    number = gpu.access(x.shape[-1], gpu.type_of(x), gpu.type_of(out))
    if number < 4:
        wide = f"{x.name} is {x.shape[-1]} wide"
        fix = "--base-dtype mxfp4" if copy.form is not None and copy.form.dtype == "int8" else "--matmul-dtype bf16"
        raise UsageError(f"{wide}, and its copies in 8 bits need a multiple of 16: use {fix}")
    assert copy.form is not None and not out.accumulate and not out.amax
    packs, warps = -(-x.shape[-1] // number), 1
    while warps < 32 and packs > 32 * warps * HELD_PACKS:
        warps *= 2
    return {
        "X": gpu.type_of(x),
        "T": gpu.type_of(out),
        "C": x.shape[-1],
        "N": number,
        "FORMS": forms,
        "E4M3": int(copy.form.dtype == "e4m3"),
        "INT8": int(copy.form.dtype == "int8"),
        "WARPS": warps,
        "PER": PER[scaling],
    }


def _rows(out: Output, scale: Output, copy: Tensor, x: Tensor, limit: float, scratch: Any) -> None:
    """The copy in rows with one scale per row, and the scale of the whole where it is wanted."""
    import cupy

    constants = _constants(out, x, copy, gpu.ROW, "rowwise")
    cell = gpu.room(scratch, SCRATCH_BYTES) if scale.wanted else 0
    if cell:
        cupy.cuda.runtime.memsetAsync(cell, 0, 4, cupy.cuda.get_current_stream().ptr)
    rows, lanes = gpu.rows_of(x.shape), 32 * int(constants["WARPS"])
    threads = max(THREADS, lanes)
    arguments = (copy, gpu.address(copy.scale), cell, x, np.int64(rows))
    gpu.launch("quantize", "quantize_rows", -(-rows // (threads // lanes)), threads, arguments, constants)
    if cell:
        gpu.launch("quantize", "whole_scale", 1, 1, (scale, cell, np.float32(limit)), constants)


def _tiles(out: Output, scaling: str, row: Tensor | None, col: Tensor | None, x: Tensor) -> None:
    """Copies with one scale per tile, per 128 numbers, or per column, whose largest values are then found first."""
    import cupy

    copy = row or col
    assert copy is not None and copy.form is not None
    assert gpu.height(out) in (0, gpu.rows_of(x.shape)), f"{out.name}: columns of a taller copy"
    constants = _constants(out, x, copy, gpu.ROW * (row is not None) + gpu.COL * (col is not None), scaling)
    rows, across = gpu.rows_of(x.shape), -(-x.shape[-1] // BLOCK)
    scales = [0 if tensor is None else gpu.address(tensor.scale) for tensor in (row, col)]
    if scaling == "rowwise":
        cupy.cuda.runtime.memsetAsync(scales[1], 0, 4 * x.shape[-1], cupy.cuda.get_current_stream().ptr)
        blocks = across * -(-rows // AMAX_ROWS)
        gpu.launch("quantize", "column_amax", blocks, THREADS, (scales[1], x, np.int64(rows)), constants)
        gpu.launch("quantize", "column_scale", -(-x.shape[-1] // THREADS), THREADS, (scales[1],), constants)
    arguments = (row, scales[0], col, scales[1], x, np.int64(rows))
    gpu.launch("quantize", "quantize_tiles", across * -(-rows // BLOCK), THREADS, arguments, constants)


KERNELS = (gpu.Kernel(quantize, lambda call: SCRATCH_BYTES),)
