"""Launches that begin before the kernel before them is done: "programmatic dependent launch" of CUDA, from 9.0 on.

A captured graph has them too. CuPy has no launch attributes, so the driver is called.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


def launch_early(
    function: Any, grid: tuple[int, ...], threads: int, arguments: tuple[Any, ...], shared_bytes: int
) -> None:
    """Puts a CuPy function on CuPy's current stream; RuntimeError if the driver refuses it."""
    import cupy
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, cupy.cuda.get_current_stream().ptr
    config.attrs, config.numAttrs = [attribute], 1
    values = [np.array(value, np.uint64) if type(value) is int else np.asarray(value) for value in arguments]
    places = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
    (status,) = driver.cuLaunchKernelEx(config, driver.CUfunction(function.kernel.ptr), ctypes.addressof(places), 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver refuses a launch of {grid} blocks of {threads} threads: {status.name}")
