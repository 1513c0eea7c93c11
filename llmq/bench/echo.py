"""A world without links, to measure a step against: what communication costs.

The exposed part is what a step takes longer than the same plan on `EchoWorld`, where a rank gets its own data in place
of the others'. Nothing but the copies within its own memory is left of the collectives, and numbers keep their usual
size: with garbage for weights the loss would not be finite, updates would be skipped, and cards would draw less power.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np


class EchoWorld:
    """One of `size` ranks that hears itself: all that it receives is its own data, as often as needed to fill it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._own: list[tuple[int, int]] = []  # addresses and bytes within a group: what this rank sends,
        self._others: list[tuple[int, int]] = []  # and what it waits for
        self._largest = (0, 0)  # that it has sent: for tensors of which it has no rows

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray]) -> None:
        """Arrays of the host."""
        for target in incoming:
            target[...] = np.resize(outgoing[self.rank], target.shape)

    def gather(self, message: Any) -> list[Any]:
        """The message, from everyone."""
        return [message] * self.size

    def captured(self, program: Any) -> None:
        """No graph keeps it from ending."""

    def close(self) -> None:
        """Nothing to do."""

    @contextmanager
    def group(self, known: dict[str, Any] | None = None) -> Iterator[None]:
        """At its end everything is received."""
        yield
        own = self._own or [self._largest]
        for index, (target, num_bytes) in enumerate(self._others):
            source, size = own[index % len(own)]  # a copy's bytes and its scales take turns
            for start in range(0, num_bytes, size) if size else ():
                _copy(target + start, source, min(size, num_bytes - start))
        self._largest = max([self._largest, *self._own], key=lambda one: one[1])
        self._own, self._others = [], []

    # device addresses, as in NcclWorld

    def broadcast(self, source: int, target: int, num_bytes: int, root: int) -> None:
        """`target` <- `source`, of this rank; or later, of its own."""
        if root != self.rank:
            self._others.append((target, num_bytes))
            return
        self._own.append((source, num_bytes))
        if source != target:
            _copy(target, source, num_bytes)

    def reduce(self, at: int, count: int, dtype: np.dtype, root: int) -> None:
        """The sum is what is there."""

    def all_reduce(self, source: int, target: int, count: int, dtype: np.dtype, *, largest: bool) -> None:
        """`target` <- `source`."""
        _copy(target, source, count * dtype.itemsize)

    def send(self, source: int, num_bytes: int, to: int) -> None:
        """Kept for what is received in the same group."""
        self._own.append((source, num_bytes))

    def receive(self, target: int, num_bytes: int, source: int) -> None:
        """At the end of the group."""
        self._others.append((target, num_bytes))


def _copy(target: int, source: int, num_bytes: int) -> None:
    """Bytes of the GPU, on the current stream."""
    from cupy.cuda import get_current_stream, runtime

    runtime.memcpyAsync(target, source, num_bytes, runtime.memcpyDeviceToDevice, get_current_stream().ptr)
