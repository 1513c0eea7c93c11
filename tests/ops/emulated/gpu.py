"""A GPU that is not there: launchers of `llmq.ops.cuda` run their kernels on the CPU, on arrays of the host."""

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmq.ops.cuda import launch

from .kernels import Kernels

CAPABILITY = 90
ALIGNMENT = 512  # of an allocation's address, bytes


class Array(np.ndarray):
    """What the launchers and tests use of a CuPy array."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self) -> np.ndarray:
        return np.array(self)


def empty(shape: Any, dtype: Any = np.float32) -> Array:
    """An array at an address as CuPy gives them."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.full(size + ALIGNMENT, 0xFF, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(Array).view(dtype).reshape(shape)


def asarray(values: np.ndarray) -> Array:
    """A copy."""
    made = empty(values.shape, values.dtype)
    made[...] = values
    return made


def full(shape: Any, value: Any, dtype: Any) -> Array:
    """An array of one value."""
    made = empty(shape, dtype)
    made[...] = value
    return made


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Kernels:
    """Puts the CPU in the GPU's place; kernels are compiled into `folder`."""
    kernels = Kernels(folder)
    stream = SimpleNamespace(ptr=0, synchronize=lambda: None)
    copies = {"memcpyAsync": _memcpy, "memcpyDefault": 4, "memcpyHostToDevice": 1}
    runtime = SimpleNamespace(getDevice=lambda: 0, memsetAsync=_memset, **copies)
    cupy = SimpleNamespace(
        asarray=asarray,
        full=full,
        empty=empty,
        uint8=np.uint8,
        cuda=SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(launch, "kernel", kernels.kernel)
    monkeypatch.setattr(launch, "launch_early", _launch_early)
    monkeypatch.setattr(launch, "device_facts", lambda _: (CAPABILITY, 4))
    return kernels


def _launch_early(
    function: Any, grid: tuple[int, ...], threads: int, arguments: tuple[Any, ...], shared_bytes: int
) -> None:
    function(grid, (threads,), arguments, shared_mem=shared_bytes)


def _memcpy(target: int, source: int, size: int, kind: int, stream: int) -> None:
    ctypes.memmove(target, source, size)


def _memset(address: int, value: int, size: int, stream: int) -> None:
    ctypes.memset(address, value, size)
