"""Copies in other forms, and scales, on the GPU; see cast.cu, transpose.cu, dequantize.cu and unpack.cu in cuda/."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from llmq.errors import UsageError
from llmq.few_bits import MX_BLOCK, NF4_BLOCK
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants
from llmq.ops.seam import Arguments
from llmq.scaling import Nested
from llmq.tensor import LARGEST

TRANSPOSED = 64  # rows of a tile that is written transposed (cast.cu)
AMAX_BLOCKS = 1056  # 8 per multiprocessor of an H200
SCALES = {"current": 0, "delayed": 0, "tilewise": 1, "powers": 2}  # of what is cast to its value (dequantize.cu)
FORMATS = {"nf4": 0, "mxfp4": 1, "int8": 2}  # unpack.cu
TURNED = 128  # rows and columns of a tile of transpose.cu


def cast(out: Output, /, x: Tensor) -> None:
    """out, in every wanted form, <- x (the same shape)."""
    if not out.wanted:
        return
    if x.form is not None and [target.form for target in out.tensors] == [replace(x.form, layout="col")]:
        _transpose(out.tensors[0], x)
        return
    if x.form is not None and x.form.dtype in FORMATS:
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
    gpu.launch("cast", "cast", blocks, gpu.TILE_THREADS, arguments, constants)


def _transpose(out: Tensor, x: Tensor) -> None:
    """Bytes of the columns of x <- those of its rows, with the scales of tiles."""
    rows, columns = gpu.rows_of(x.shape), x.shape[-1]
    constants: Constants = {"C": columns, "VECTOR": int(rows % 16 == 0 and columns % 16 == 0)}
    blocks = -(-rows // TURNED) * -(-columns // TURNED)
    owns = x.form is not None and x.form.owns_scales
    scales = (gpu.address(out.scale), gpu.address(x.scale)) if owns else (0, 0)
    arguments = (out, x, *scales, np.int64(rows))
    gpu.launch("transpose", "transpose", blocks, gpu.TILE_THREADS, arguments, constants)


def _dequantize(out: Output, x: Tensor) -> None:
    """The value that fp8 rows stand for."""
    assert x.form is not None and x.form.dtype == "e4m3"
    kind, columns, size = gpu.type_of(out), x.shape[-1], math.prod(x.shape)
    number = min(8, gpu.access(columns, "bf16"))
    constants: Constants = {"T": kind, "C": columns, "N": number, "SCALES": SCALES[x.form.scaling or ""]}
    arguments = (out, x, gpu.address(x.scale), np.int64(size))
    blocks = -(-size // (gpu.TILE_THREADS * number))
    gpu.launch("dequantize", "dequantize", blocks, gpu.TILE_THREADS, arguments, constants)


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
    arguments = (*outputs, x, gpu.address(x.scale), first, np.int64(rows), np.int64(gpu.height(out)))
    blocks = gpu.tiles(rows, columns, int(wanted["FORMS"]), number, TRANSPOSED)
    gpu.launch("unpack", "unpack", blocks, gpu.TILE_THREADS, arguments, constants)


def _format(x: Tensor) -> tuple[Constants, np.int64]:
    """What unpack.cu knows of numbers in 4 or 8 bits, and where the bytes of NF4's scales begin."""
    assert x.form is not None and x.form.dtype in FORMATS and x.scale is not None
    scales = x.form.scales
    first = x.scale.shape[0] - math.prod(x.shape) // NF4_BLOCK if isinstance(scales, Nested) else 0
    group = scales.group if isinstance(scales, Nested) else 1
    return {"K": x.shape[-1], "FORMAT": FORMATS[x.form.dtype], "GROUP": group}, np.int64(first)


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
    if not scale.wanted:
        return
    kind, count = gpu.type_of(x), math.prod(x.shape)
    number = gpu.access(count, kind)
    constants: Constants = {"X": kind, "T": kind, "C": gpu.TILE_LANES, "N": number, "FORMS": 0, "E4M3": 1}
    blocks = min(AMAX_BLOCKS, -(-count // (gpu.TILE_THREADS * number)))
    arguments = (scale, x, np.float32(limit), np.int64(count), np.int32(gpu.stream_index()))
    gpu.launch("cast", "amax_scale", blocks, gpu.TILE_THREADS, arguments, constants)


def amax(out: Output, /, x: Tensor, *, in_bf16: bool) -> None:
    """out (1,) f32 <- the largest magnitude of x (any shape; in 4 or 8 bits), as it is or in bf16."""
    import cupy

    if not out.wanted:
        return
    kind, width, count = "bf16" if in_bf16 else "float", x.shape[-1], math.prod(x.shape)
    cupy.cuda.runtime.memsetAsync(gpu.plain(out), 0, 4, cupy.cuda.get_current_stream().ptr)
    number = gpu.access(count, gpu.type_of(x)) if x.form is None else gpu.access(width, kind)
    blocks = min(AMAX_BLOCKS, -(-count // (gpu.TILE_THREADS * number)))
    constants: Constants = {"T": kind, "N": number, "FORMS": 0, "E4M3": 1}
    if x.form is None:
        constants = {**constants, "X": gpu.type_of(x), "C": gpu.TILE_LANES}
        gpu.launch("cast", "amax", blocks, gpu.TILE_THREADS, (out, x, np.int64(count)), constants)
        return
    about, first = _format(x)
    arguments = (out, x, gpu.address(x.scale), first, np.int64(count))
    gpu.launch("unpack", "held_amax", blocks, gpu.TILE_THREADS, arguments, {**constants, **about, "C": width})


def scale_update(
    new_scale: Output, new_history: Output, new_amax: Output, /, scale: Tensor, history: Tensor, *others: Tensor
) -> None:
    """new_scale (N,), new_history (H,N), new_amax (N,) <- scale, amax, limits (N,), history (H,N), apply (1,)."""
    depth, cells = history.shape
    constants: Constants = {"X": "float", "T": "float", "C": gpu.TILE_LANES, "N": 4, "FORMS": 0, "E4M3": 1}
    arguments = (new_scale, new_history, new_amax, scale, history, *others, np.int32(cells), np.int32(depth))
    gpu.launch("cast", "scale_update", -(-cells // 128), 128, arguments, constants)


def _refuse_cast(call: Arguments, capability: int) -> None:
    """UsageError for what reads a quantized copy, unless it writes the value, or the same bytes transposed."""
    form = call.reads["x"].form
    if form is None or form.scaling is None:
        return
    written = [ref.form for ref in call.writes["out"]]
    if form.dtype in FORMATS and all(one is None or (one.dtype in LARGEST and one.is_measured) for one in written):
        return
    turns = form.turns and written == [replace(form, layout="col")]
    is_known = form.dtype == "e4m3" and form.layout == "row" and form.scaling in SCALES
    if not turns and not (is_known and written == [None]):
        raise UsageError(f"{call.reads['x'].name} is stored in {form.key}, which no kernel casts: use --device cpu")


KERNELS = (gpu.Kernel(cast, refuse=_refuse_cast), gpu.Kernel(amax_scale), gpu.Kernel(amax), gpu.Kernel(scale_update))
