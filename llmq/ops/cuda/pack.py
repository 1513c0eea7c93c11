"""Numbers of few bits that frozen weights are held in, and their scales, on the GPU; see cuda/pack.cu and nest.cu."""

from __future__ import annotations

import numpy as np

from llmq.few_bits import DYNAMIC, MX_BLOCK, NESTED_BLOCK, NF4_BLOCK
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants
from llmq.scaling import BLOCK

THREADS, SUMMED = 256, 1024  # pack.cu and nest.cu
FORMATS = {"absmax": 0, "exponents": 1, "powers": 2}  # of pack.cu, by scaling
PER_SCALE = {"absmax": NF4_BLOCK, "exponents": MX_BLOCK, "powers": BLOCK}  # consecutive numbers of a row


def pack(out: Output, copy: Tensor, x: Tensor) -> None:
    """A copy of `out` in 4 bits, or in e4m3 with powers of two, and its scales <- x."""
    assert copy.form is not None and copy.form.scaling in FORMATS and not out.accumulate and not out.amax
    scaling, rows, columns = copy.form.scaling, gpu.rows_of(x.shape), x.shape[-1]
    per_scale = PER_SCALE[scaling]
    if scaling == "absmax" or columns % per_scale == 0:  # blocks go by flat numbers
        rows, columns = rows * columns // per_scale, per_scale
    number = min(4, gpu.access(columns, gpu.type_of(x), gpu.type_of(out)))
    items = rows * -(-columns // per_scale) * (per_scale // number)
    types: Constants = {"X": gpu.type_of(x), "T": gpu.type_of(out)}
    constants: Constants = {**types, "C": columns, "N": number, "FORMAT": FORMATS[scaling]}
    arguments = (copy, gpu.address(copy.scale), x, np.int64(rows))
    gpu.launch("pack", "pack", -(-items // THREADS), THREADS, arguments, constants)


def nest(out: Output, /, absmax: Tensor, *, group: int, borders: tuple[int, ...]) -> None:
    """out (bytes,) uint8 <- absmax (n,) f32, the scales of tensors that end at `borders`."""
    if not out.wanted:
        return
    written, read, constants = gpu.pointer(out.tensors[0]), gpu.pointer(absmax), {"GROUP": group}
    codes, start = out.shape[0] - absmax.shape[0], 0
    for stop in borders:
        table = written + DYNAMIC.nbytes + 8 * (start // group)
        first, count = np.int64(start // group), np.int64(stop - start)
        gpu.launch("nest", "absmax_mean", 1, SUMMED, (table + 4, read + 4 * start, count), constants)
        arguments = (written, read + 4 * start, first, np.int64(codes + start), count)
        gpu.launch("nest", "nest", -(-int(count) // (NESTED_BLOCK * THREADS // 32)), THREADS, arguments, constants)
        start = stop


KERNELS = (gpu.Kernel(nest),)
