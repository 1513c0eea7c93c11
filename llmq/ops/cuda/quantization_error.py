"""Errors of fp8 copies on the GPU; see cuda/quantization_error.cu."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants

BLOCKS, THREADS, FIELDS = 1024, 256, 6
SCRATCH_BYTES = BLOCKS * FIELDS * 4  # six numbers per block
PER = {"delayed": 0, "current": 0, "rowwise": 1, "blockwise": 2, "tilewise": 3}  # what one scale is for


def quantization_error(new_error: Output, /, error: Tensor, x: Tensor, copy: Tensor, *, scratch: Any = None) -> None:
    """new_error (6,) <- error (6,), x (any shape), its `copy` in fp8 rows."""
    assert copy.form is not None and copy.form.layout == "row" and copy.scale is not None
    kind, count, columns = gpu.type_of(x), math.prod(x.shape), x.shape[-1]
    per = PER[str(copy.form.scaling)]
    number = gpu.access(columns if per else count, kind)  # an access has one scale
    e4m3 = int(copy.form.dtype == "e4m3")
    constants: Constants = {"X": kind, "C": columns, "N": number, "E4M3": e4m3, "PER": per}
    blocks = min(BLOCKS, -(-count // (THREADS * number)))
    parts = gpu.room(scratch, SCRATCH_BYTES)
    read = (x, copy, gpu.address(copy.scale), np.int64(count))
    gpu.launch("quantization_error", "error_parts", blocks, THREADS, (parts, *read), constants)
    last = (new_error, error, parts, np.int32(blocks))
    gpu.launch("quantization_error", "error_total", 1, THREADS, last, constants)


KERNELS = (gpu.Kernel(quantization_error, lambda call: SCRATCH_BYTES),)
