"""Copies between the GPU's memory and pinned memory of the host, by the driver, on the current stream; cuda/repeat.cu.

An array of the host is a NumPy array over pinned memory; from any other memory the copy would wait, and a graph could
not hold it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants

THREADS = 256  # repeat.cu


def copy_to_host(out: Output, /, x: Tensor) -> None:
    """out <- x, in the one form that both have, with the scales of a form that owns its scales."""
    _copy(out, x)


def copy_to_device(out: Output, /, x: Tensor) -> None:
    """out <- x, in the one form that both have, with the scales of a form that owns its scales."""
    _copy(out, x)


def _copy(out: Output, x: Tensor) -> None:
    for target in out.tensors:
        alike = (target.form, target.array.shape) == (x.form, x.array.shape)
        assert alike and not out.accumulate and not out.amax, f"{out.name} is no plain copy of {x.name}"
        copy_bytes(target.array, x.array)
        if x.form is not None and x.form.owns_scales:
            copy_bytes(target.scale, x.scale)


def copy_bytes(target: Any, source: Any) -> None:
    import cupy

    assert target.nbytes == source.nbytes and target.flags.c_contiguous and source.flags.c_contiguous
    if not source.nbytes:  # a share may have no rows
        return
    runtime = cupy.cuda.runtime
    stream = cupy.cuda.get_current_stream().ptr
    # the driver sees from the addresses which side is the host
    runtime.memcpyAsync(gpu.address(target), gpu.address(source), source.nbytes, runtime.memcpyDefault, stream)


def repeat(out: Output, /, block: Tensor, *, first: int) -> None:
    """out (any shape) <- block (n,): its flat element i is element (first + i) mod n of the block."""
    if not out.wanted:
        return
    count = math.prod(out.shape)
    number = gpu.access(count, gpu.type_of(out))
    arguments = (out, block, np.int64(first % block.shape[0]), np.int64(block.shape[0]))
    constants: Constants = {"X": gpu.type_of(block), "T": gpu.type_of(out), "N": number}
    blocks = -(-count // (THREADS * number))
    gpu.launch("repeat", "repeat", blocks, THREADS, (*arguments, np.int64(count)), constants)


KERNELS = (gpu.Kernel(copy_to_host), gpu.Kernel(copy_to_device), gpu.Kernel(repeat))
