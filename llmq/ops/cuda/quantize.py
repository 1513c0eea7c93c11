"""Copies in other forms, their scales and their errors, on the GPU.

See cast.cu, transpose.cu, dequantize.cu, unpack.cu, quantize.cu, pack.cu, nest.cu and quantization_error.cu in cuda/.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.few_bits import DYNAMIC, MX_BLOCK, NESTED_BLOCK, NF4_BLOCK
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants
from llmq.ops.seam import Arguments
from llmq.scaling import BLOCK, Nested
from llmq.tensor import LARGEST

THREADS = gpu.TILE_THREADS
TRANSPOSED = 64  # rows of a tile that is written transposed (cast.cu)
AMAX_BLOCKS = 1056  # 8 per multiprocessor of an H200
TURNED = 128  # rows and columns of a tile of transpose.cu
SCALES = {"current": 0, "delayed": 0, "tilewise": 1, "powers": 2}  # of what is cast to its value (dequantize.cu)
UNPACKED = {"nf4": 0, "mxfp4": 1, "int8": 2}  # unpack.cu
HELD_PACKS = 8  # quantize.cu
PER_TILE = {"blockwise": 0, "tilewise": 1, "rowwise": 2}  # of the kernel over tiles, where "rowwise" is a column's
AMAX_ROWS = 8 * BLOCK  # that a block of column_amax reads
AMAX_BYTES = 4  # of scratch: the largest magnitude
PACKED = {"absmax": 0, "exponents": 1, "powers": 2}  # of pack.cu, by scaling
PER_SCALE = {"absmax": NF4_BLOCK, "exponents": MX_BLOCK, "powers": BLOCK}  # consecutive numbers of a row
SUMMED = 1024  # nest.cu
ERROR_BLOCKS, FIELDS = 1024, 6  # quantization_error.cu
ERROR_BYTES = ERROR_BLOCKS * FIELDS * 4  # of scratch: six numbers per block
ERROR_PER = {"delayed": 0, "current": 0, "rowwise": 1, "blockwise": 2, "tilewise": 3}  # what one scale is for


def _refuse_cast(call: Arguments, capability: int) -> None:
    """UsageError for what reads a quantized copy, unless it writes the value, or the same bytes transposed."""
    form = call.reads["x"].form
    if form is None or form.scaling is None:
        return
    written = [ref.form for ref in call.writes["out"]]
    if form.dtype in UNPACKED and all(one is None or (one.dtype in LARGEST and one.is_measured) for one in written):
        return
    turns = form.turns and written == [replace(form, layout="col")]
    is_known = form.dtype == "e4m3" and form.layout == "row" and form.scaling in SCALES
    if not turns and not (is_known and written == [None]):
        raise UsageError(f"{call.reads['x'].name} is stored in {form.key}, which no kernel casts: use --device cpu")


@gpu.asks(refuse=_refuse_cast)
def cast(out: Output, /, x: Tensor) -> None:
    """out, in every wanted form, <- x (the same shape)."""
    if x.form is not None and [target.form for target in out.tensors] == [replace(x.form, layout="col")]:
        _transpose(out.tensors[0], x)
        return
    if x.form is not None and x.form.dtype in UNPACKED:
        _unpack(out, x)
        return
    if x.form is not None and x.form.scaling is not None:
        _dequantize(out, x)
        return
    wanted, outputs = gpu.forms(out, may_be_cut=True)
    rows, columns, number = matrix(x.shape, int(wanted["FORMS"]), gpu.type_of(x), gpu.type_of(out))
    constants = {"X": gpu.type_of(x), "T": gpu.type_of(out), "C": columns, "N": number, **wanted}
    blocks = gpu.tiles(rows, columns, int(wanted["FORMS"]), number, TRANSPOSED)
    arguments = (*outputs, x, np.int64(rows), np.int64(gpu.height(out)))
    gpu.launch("cast", "cast", blocks, THREADS, arguments, constants)


def _transpose(out: Tensor, x: Tensor) -> None:
    """Bytes of the columns of x <- those of its rows, with the scales of tiles."""
    rows, columns = gpu.rows_of(x.shape), x.shape[-1]
    constants = {"C": columns, "VECTOR": int(rows % 16 == 0 and columns % 16 == 0)}
    blocks = -(-rows // TURNED) * -(-columns // TURNED)
    owns = x.form is not None and x.form.owns_scales
    scales = (gpu.scale_of(out), gpu.scale_of(x)) if owns else (0, 0)
    gpu.launch("transpose", "transpose", blocks, THREADS, (out, x, *scales, np.int64(rows)), constants)


def _dequantize(out: Output, x: Tensor) -> None:
    """The value that fp8 rows stand for."""
    assert x.form is not None and x.form.dtype == "e4m3"
    kind, columns, size = gpu.type_of(out), x.shape[-1], math.prod(x.shape)
    number = min(8, gpu.access(columns, "bf16"))
    constants: Constants = {"T": kind, "C": columns, "N": number, "SCALES": SCALES[x.form.scaling or ""]}
    arguments = (out, x, gpu.scale_of(x), np.int64(size))
    blocks = -(-size // (THREADS * number))
    gpu.launch("dequantize", "dequantize", blocks, THREADS, arguments, constants)


def _unpack(out: Output, x: Tensor) -> None:
    """What numbers of 4 or 8 bits stand for, in its forms."""
    assert x.form is not None
    format_, kind, width = x.form.dtype, gpu.type_of(out), x.shape[-1]
    wanted, outputs = gpu.forms(out, may_be_cut=True)
    is_flat = format_ == "nf4" or (format_ == "mxfp4" and width % MX_BLOCK == 0)  # blocks go by flat numbers
    rows, columns, number = gpu.rows_of(x.shape), width, gpu.access(width, kind)
    if is_flat:
        rows, columns, number = matrix((rows, width), int(wanted["FORMS"]), kind)
    about, first = _format(x)
    constants: Constants = {"T": kind, "C": columns, "N": number, **about, **wanted}
    arguments = (*outputs, x, gpu.scale_of(x), first, np.int64(rows), np.int64(gpu.height(out)))
    blocks = gpu.tiles(rows, columns, int(wanted["FORMS"]), number, TRANSPOSED)
    gpu.launch("unpack", "unpack", blocks, THREADS, arguments, constants)


def _format(x: Tensor) -> tuple[Constants, np.int64]:
    """What unpack.cu knows of numbers in 4 or 8 bits, and where the bytes of NF4's scales begin."""
    assert x.form is not None and x.form.dtype in UNPACKED and x.scale is not None
    scales = x.form.scales
    first = x.scale.shape[0] - math.prod(x.shape) // NF4_BLOCK if isinstance(scales, Nested) else 0
    group = scales.group if isinstance(scales, Nested) else 1
    return {"K": x.shape[-1], "FORMAT": UNPACKED[x.form.dtype], "GROUP": group}, np.int64(first)


def matrix(shape: tuple[int, ...], wanted: int, *types: str) -> tuple[int, int, int]:
    """Rows, columns and numbers per access: as wide as a tile where the forms do not depend on the shape."""
    count = math.prod(shape)
    number = gpu.access(shape[-1], *types)
    flat = gpu.access(count, *types)
    if not wanted & (gpu.COL | gpu.SUMS) and count % (gpu.TILE_LANES * flat) == 0:
        return count // (gpu.TILE_LANES * flat), gpu.TILE_LANES * flat, flat
    return gpu.rows_of(shape), shape[-1], number


def amax_scale(scale: Output, /, x: Tensor, *, limit: float) -> None:
    """scale (1,) <- x (any shape): amax(|x|) / limit; 1 if amax is 0 or not finite."""
    kind, count = gpu.type_of(x), math.prod(x.shape)
    number = gpu.access(count, kind)
    constants: Constants = {"X": kind, "T": kind, "C": gpu.TILE_LANES, "N": number, "FORMS": 0, "E4M3": 1}
    blocks = min(AMAX_BLOCKS, -(-count // (THREADS * number)))
    arguments = (scale, x, np.float32(limit), np.int64(count), np.int32(gpu.stream_index()))
    gpu.launch("cast", "amax_scale", blocks, THREADS, arguments, constants)


def amax(out: Output, /, x: Tensor, *, in_bf16: bool) -> None:
    """out (1,) f32 <- the largest magnitude of x (any shape; in 4 or 8 bits), as it is or in bf16."""
    kind, width, count = "bf16" if in_bf16 else "float", x.shape[-1], math.prod(x.shape)
    gpu.zero(gpu.plain(out), 4)
    number = gpu.access(count, gpu.type_of(x)) if x.form is None else gpu.access(width, kind)
    blocks = min(AMAX_BLOCKS, -(-count // (THREADS * number)))
    constants: Constants = {"T": kind, "N": number, "FORMS": 0, "E4M3": 1}
    if x.form is None:
        constants = {**constants, "X": gpu.type_of(x), "C": gpu.TILE_LANES}
        gpu.launch("cast", "amax", blocks, THREADS, (out, x, np.int64(count)), constants)
        return
    about, first = _format(x)
    arguments = (out, x, gpu.scale_of(x), first, np.int64(count))
    gpu.launch("unpack", "held_amax", blocks, THREADS, arguments, {**constants, **about, "C": width})


def scale_update(
    new_scale: Output, new_history: Output, new_amax: Output, /, scale: Tensor, history: Tensor, *others: Tensor
) -> None:
    """new_scale (N,), new_history (H,N), new_amax (N,) <- scale, amax, limits (N,), history (H,N), apply (1,)."""
    depth, cells = history.shape
    constants: Constants = {"X": "float", "T": "float", "C": gpu.TILE_LANES, "N": 4, "FORMS": 0, "E4M3": 1}
    arguments = (new_scale, new_history, new_amax, scale, history, *others, np.int32(cells), np.int32(depth))
    gpu.launch("cast", "scale_update", -(-cells // 128), 128, arguments, constants)


@gpu.asks(lambda call: AMAX_BYTES)
def quantize(out: Output, scale: Output, /, x: Tensor, *, limit: float, scratch: Any = None) -> None:
    """out, in every wanted form with its scales, and scale (1,) <- x (the shape of out)."""
    copies = {_place(tensor): tensor for tensor in out.tensors}
    by_rows = copies.pop(("rowwise", "row"), None)
    if by_rows is not None:
        _rows(out, scale, by_rows, x, limit, scratch)
    elif scale.wanted:
        amax_scale(scale, x, limit=limit)
    for scaling in PACKED:
        if (packed := copies.pop((scaling, "row"), None)) is not None:
            _pack(out, packed, x)
    for scaling in PER_TILE:
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
    types: Constants = {"X": gpu.type_of(x), "T": gpu.type_of(out), "C": x.shape[-1], "N": number, "FORMS": forms}
    codes = {name.upper(): int(copy.form.dtype == name) for name in ("e4m3", "int8")}
    return {**types, **codes, "WARPS": warps, "PER": PER_TILE[scaling]}


def _rows(out: Output, scale: Output, copy: Tensor, x: Tensor, limit: float, scratch: Any) -> None:
    """The copy in rows with one scale per row, and the scale of the whole where it is wanted."""
    constants = _constants(out, x, copy, gpu.ROW, "rowwise")
    cell = gpu.room(scratch, AMAX_BYTES) if scale.wanted else 0
    if cell:
        gpu.zero(cell, 4)
    rows, lanes = gpu.rows_of(x.shape), 32 * int(constants["WARPS"])
    threads = max(THREADS, lanes)
    arguments = (copy, gpu.scale_of(copy), cell, x, np.int64(rows))
    gpu.launch("quantize", "quantize_rows", -(-rows // (threads // lanes)), threads, arguments, constants)
    if cell:
        gpu.launch("quantize", "whole_scale", 1, 1, (scale, cell, np.float32(limit)), constants)


def _tiles(out: Output, scaling: str, row: Tensor | None, col: Tensor | None, x: Tensor) -> None:
    """Copies with one scale per tile, per 128 numbers, or per column, whose largest values are then found first."""
    copy = row or col
    assert copy is not None and copy.form is not None
    assert gpu.height(out) in (0, gpu.rows_of(x.shape)), f"{out.name}: columns of a taller copy"
    constants = _constants(out, x, copy, gpu.ROW * (row is not None) + gpu.COL * (col is not None), scaling)
    rows, across = gpu.rows_of(x.shape), -(-x.shape[-1] // BLOCK)
    scales = [gpu.scale_of(tensor) for tensor in (row, col)]
    if scaling == "rowwise":
        gpu.zero(scales[1], 4 * x.shape[-1])
        blocks = across * -(-rows // AMAX_ROWS)
        gpu.launch("quantize", "column_amax", blocks, THREADS, (scales[1], x, np.int64(rows)), constants)
        gpu.launch("quantize", "column_scale", -(-x.shape[-1] // THREADS), THREADS, (scales[1],), constants)
    arguments = (row, scales[0], col, scales[1], x, np.int64(rows))
    gpu.launch("quantize", "quantize_tiles", across * -(-rows // BLOCK), THREADS, arguments, constants)


def _pack(out: Output, copy: Tensor, x: Tensor) -> None:
    """A copy of `out` in 4 bits, or in e4m3 with powers of two, and its scales <- x."""
    assert copy.form is not None and copy.form.scaling in PACKED and not out.accumulate and not out.amax
    scaling, rows, columns = copy.form.scaling, gpu.rows_of(x.shape), x.shape[-1]
    per_scale = PER_SCALE[scaling]
    if scaling == "absmax" or columns % per_scale == 0:  # blocks go by flat numbers
        rows, columns = rows * columns // per_scale, per_scale
    number = min(4, gpu.access(columns, gpu.type_of(x), gpu.type_of(out)))
    items = rows * -(-columns // per_scale) * (per_scale // number)
    types: Constants = {"X": gpu.type_of(x), "T": gpu.type_of(out)}
    constants: Constants = {**types, "C": columns, "N": number, "FORMAT": PACKED[scaling]}
    arguments = (copy, gpu.scale_of(copy), x, np.int64(rows))
    gpu.launch("pack", "pack", -(-items // THREADS), THREADS, arguments, constants)


def nest(out: Output, /, absmax: Tensor, *, group: int, borders: tuple[int, ...]) -> None:
    """out (bytes,) uint8 <- absmax (n,) f32, the scales of tensors that end at `borders`."""
    written, read, constants = gpu.pointer(out.tensors[0]), gpu.pointer(absmax), {"GROUP": group}
    codes, start = out.shape[0] - absmax.shape[0], 0
    for stop in borders:
        table = written + DYNAMIC.nbytes + 8 * (start // group)
        first, count = np.int64(start // group), np.int64(stop - start)
        gpu.launch("nest", "absmax_mean", 1, SUMMED, (table + 4, read + 4 * start, count), constants)
        arguments = (written, read + 4 * start, first, np.int64(codes + start), count)
        gpu.launch("nest", "nest", -(-int(count) // (NESTED_BLOCK * THREADS // 32)), THREADS, arguments, constants)
        start = stop


@gpu.asks(lambda call: ERROR_BYTES)
def quantization_error(new_error: Output, /, error: Tensor, x: Tensor, copy: Tensor, *, scratch: Any = None) -> None:
    """new_error (6,) <- error (6,), x (any shape), its `copy` in fp8 rows."""
    assert copy.form is not None and copy.form.layout == "row" and copy.scale is not None
    kind, count, columns = gpu.type_of(x), math.prod(x.shape), x.shape[-1]
    per = ERROR_PER[str(copy.form.scaling)]
    number = gpu.access(columns if per else count, kind)  # an access has one scale
    e4m3 = int(copy.form.dtype == "e4m3")
    constants: Constants = {"X": kind, "C": columns, "N": number, "E4M3": e4m3, "PER": per}
    blocks = min(ERROR_BLOCKS, -(-count // (THREADS * number)))
    parts = gpu.room(scratch, ERROR_BYTES)
    read = (x, copy, gpu.scale_of(copy), np.int64(count))
    gpu.launch("quantization_error", "error_parts", blocks, THREADS, (parts, *read), constants)
    last = (new_error, error, parts, np.int32(blocks))
    gpu.launch("quantization_error", "error_total", 1, THREADS, last, constants)
