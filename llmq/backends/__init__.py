"""A backend is ops, memory for a plan, and a way to run a list of calls again and again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from llmq.tensor import Ref

Op = Callable[..., None]
Call = Callable[[], None]


class Memory(Protocol):
    """Persistent storages by name, and one block for the activations of a program."""

    def array(self, name: str) -> np.ndarray: ...
    def place(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray: ...
    def write(self, name: str, values: np.ndarray) -> None: ...
    def read(self, name: str) -> np.ndarray: ...
    def fill(self, name: str, value: float) -> None: ...


class Backend(Protocol):
    """What the engine needs of a device."""

    @property
    def ops(self) -> Mapping[str, Op]: ...
    def scratch_bytes(self, op: str, shapes: Mapping[str, tuple[int, ...]]) -> int: ...
    def use_scratch(self, buffer: np.ndarray) -> None: ...
    def memory(self, persistent: Mapping[str, Ref], arena_bytes: int) -> Memory: ...
    def program(self, calls: Sequence[Call]) -> Call: ...


def open_backend(device: str) -> Backend:
    """The backend of a device as `llmq.device` picked it: `cpu` or `cuda`."""
    if device == "cuda":
        from llmq.backends.cuda import CudaBackend

        return CudaBackend()
    from llmq.backends.host import HostBackend

    assert device == "cpu", device
    return HostBackend()
