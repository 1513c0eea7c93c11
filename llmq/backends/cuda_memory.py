"""Memory of the GPU, and of the host in pages that the GPU copies from: asked for, refused, given back."""

from __future__ import annotations

import re
import weakref
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from llmq.disk import shown
from llmq.errors import RefusedMemoryError
from llmq.hardware.device import host_memory_bytes
from llmq.ops.cuda.timing import OUT_OF_MEMORY

PAGE_BYTES = 2 << 20  # a smaller allocation may be part of one that a handle for other processes stands for
# As the libraries say it: cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY, CUBLAS_STATUS_ALLOC_FAILED,
# CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED.
REFUSALS = re.compile("alloc(ation)?_failed|out.of.memory|MemoryAllocation", re.IGNORECASE)


def device_memory(num_bytes: int) -> int:
    """Address of device memory, not from CuPy's pool, which rounds, keeps and grows."""
    try:
        return int(runtime.malloc(max(-(-num_bytes // PAGE_BYTES), 1) * PAGE_BYTES))
    except runtime.CUDARuntimeError as error:
        if error.status != OUT_OF_MEMORY:
            raise
        raise RefusedMemoryError(
            f"the GPU refused {shown(num_bytes)}", num_bytes=num_bytes, free_bytes=int(runtime.memGetInfo()[0])
        ) from error


def free_with(owner: object, address: int, stream: Any) -> None:
    """Frees device memory when its owner is gone, after the work on the stream. At exit the driver frees it."""
    # Not in __del__: an engine that a failed run leaves in a cycle is collected together with its stream, which CuPy
    # may destroy first. Waiting for it then ends the process. A finalizer keeps the stream alive.
    weakref.finalize(owner, _free, address, stream).atexit = False


def _free(address: int, stream: Any) -> None:
    stream.synchronize()
    runtime.free(address)


def pinned(num_bytes: int) -> tuple[np.ndarray, bool]:
    """Page-locked host memory, or ordinary memory where the system refuses to lock any; and which of the two.

    RefusedMemoryError where the host has not so much free: the kernel would end the process when it is written.
    """
    try:
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(num_bytes), np.uint8, num_bytes), True
    except (runtime.CUDARuntimeError, MemoryError) as error:
        free = host_memory_bytes()[1]
        if num_bytes <= free:
            return np.empty(num_bytes, np.uint8), False
        raise RefusedMemoryError(
            f"the host refused {shown(num_bytes)}", home="host", num_bytes=num_bytes, free_bytes=free
        ) from error


def refusal(error: Exception) -> RefusedMemoryError | None:
    """What an error of CUDA or of its libraries becomes if it says that the GPU's memory is full."""
    is_cuda = isinstance(error, runtime.CUDARuntimeError)
    if getattr(error, "status", None) == OUT_OF_MEMORY if is_cuda else REFUSALS.search(f"{error}"):
        return RefusedMemoryError(
            f"the GPU refused memory to CUDA or one of its libraries ({error})",
            free_bytes=int(runtime.memGetInfo()[0]),
        )
    return None
