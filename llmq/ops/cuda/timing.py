"""Timing candidates for one piece of GPU work, on random data and with a cold L2 cache, as in a training step.

Zeros would not do: the tensor cores draw less power on them and run up to 13% faster. Nor would a warm cache, which
favours algorithms that read an operand often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median

import numpy as np

from llmq.disk import shown
from llmq.errors import RefusedMemoryError
from llmq.tensor import DTYPES

FINALISTS, ROUNDS, REPEATS = 8, 3, 3
CLEARLY_SLOWER = 1.5  # than the best so far: not worth a second look
PATTERN = 1_048_573  # random numbers, repeated: a prime, so that no row repeats another
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
COMPARED_BYTES = 16 * 2**20  # of the result, at either end


@dataclass(frozen=True)
class Timed:
    """The fastest candidate and its time, and the time of the first."""

    index: int
    microseconds: float
    first_microseconds: float


def fastest(
    launch: Callable[[int, dict[str, int]], bool],
    count: int,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, str | None],
    stream: int,
    what: str,
) -> Timed:
    """Which of `count` candidates is fastest among those that give the same bits twice.

    `launch(index, addresses)` puts one on the stream, or returns False if it cannot run. `sizes` are the bytes that it
    needs by name, those in `dtypes` filled with random numbers, scales with ones; "d" holds the result.
    RuntimeError if none runs; RefusedMemoryError if the bytes are not free.
    """
    with _Trial(launch, sizes, stream, what) as runner:
        for name, dtype in dtypes.items():
            if dtype is not None and runner.addresses[name]:
                fill_random(runner.addresses[name], sizes[name], dtype, stream)
        for name in ("scale_a", "scale_b"):
            if runner.addresses.get(name):
                _tile(runner.addresses[name], sizes[name], np.ones(PATTERN, np.float32), stream)
        first: dict[int, float] = {}
        for index in range(count):
            runner.times(index, 1)  # loads its kernel
            times = runner.times(index, 1)
            if times and times[0] < CLEARLY_SLOWER * min(first.values(), default=np.inf):
                times = runner.times(index, REPEATS)
            if times:
                first[index] = min(times)
        finalists = sorted(first, key=lambda index: first[index])[:FINALISTS]
        rounds = [{index: runner.times(index, REPEATS) for index in finalists} for _ in range(ROUNDS)]
        means = {index: median(t for done in rounds for t in done[index]) for index in finalists}
        for index in sorted(means, key=lambda index: means[index]):
            if runner.repeats_its_bits(index):
                return Timed(index, means[index], means.get(0, first.get(0, means[index])))
    raise RuntimeError(f"{what}: none of {count} algorithms ran and gave the same result twice")


def fill_random(address: int, num_bytes: int, dtype: str, stream: int) -> None:
    """Fills device memory with normal numbers of a dtype, in the order of the stream; needs no cuRAND."""
    _tile(address, num_bytes, _pattern(dtype), stream)


def is_capturing(stream: int) -> bool:
    """Whether a graph is being captured on the stream."""
    from cupy.cuda import runtime

    return bool(runtime.streamIsCapturing(stream))


class _Trial:
    """Candidates in device memory that lasts as long as a timing takes, with as much again to sweep the cache with."""

    def __init__(
        self, launch: Callable[[int, dict[str, int]], bool], sizes: Mapping[str, int], stream: int, what: str
    ) -> None:
        import cupy

        self._launch, self._runtime, self._stream = launch, cupy.cuda.runtime, stream
        # twice what the cache holds, and long enough for the host to queue the candidate meanwhile (60 us on an H200)
        self.sweep_bytes = max(4 * cupy.cuda.Device().attributes["L2CacheSize"], 64 * 2**20)
        self.sizes = {**sizes, "sweep": self.sweep_bytes}
        self.addresses = dict.fromkeys(self.sizes, 0)
        try:
            for name, size in self.sizes.items():
                if size:
                    self.addresses[name] = self._runtime.malloc(size)
        except self._runtime.CUDARuntimeError as error:
            self.__exit__()
            if error.status != OUT_OF_MEMORY:
                raise
            need, free = sum(self.sizes.values()), int(self._runtime.memGetInfo()[0])
            raise RefusedMemoryError(
                f"choosing an algorithm for the matrix product {what} takes {shown(need)} of GPU memory",
                num_bytes=need,
                free_bytes=free,
            ) from error

    def __enter__(self) -> _Trial:
        from cupy.cuda import Event

        self._events = [(Event(), Event()) for _ in range(REPEATS)]
        return self

    def __exit__(self, *_: object) -> None:
        for name, address in self.addresses.items():
            if address:
                self._runtime.free(address)
            self.addresses[name] = 0

    def ends(self, name: str) -> list[bytes]:
        """Copies of the first and last bytes of a piece."""
        part = min(self.sizes[name], COMPARED_BYTES)
        copies = []
        for offset in (0, self.sizes[name] - part):
            host, kind = np.empty(part, np.uint8), self._runtime.memcpyDeviceToHost
            self._runtime.memcpy(host.ctypes.data, self.addresses[name] + offset, part, kind)
            copies.append(host.tobytes())
        return copies

    def times(self, index: int, count: int) -> list[float]:
        """Microseconds of `count` runs of a candidate; none if it cannot run."""
        from cupy.cuda import get_elapsed_time

        stream = self._stream
        for start, end in self._events[:count]:
            self._runtime.memsetAsync(self.addresses["sweep"], 0, self.sweep_bytes, stream)
            self._runtime.eventRecord(start.ptr, stream)
            if not self._launch(index, self.addresses):
                return []
            self._runtime.eventRecord(end.ptr, stream)
        self._runtime.streamSynchronize(stream)
        return [1000 * get_elapsed_time(start, end) for start, end in self._events[:count]]

    def repeats_its_bits(self, index: int) -> bool:
        """Whether two runs from the same start give the same result."""
        results = []
        for _ in range(2):
            self._runtime.memsetAsync(self.addresses["d"], 0, self.sizes["d"], self._stream)
            self._launch(index, self.addresses)
            self._runtime.streamSynchronize(self._stream)
            results.append(self.ends("d"))
        return results[0] == results[1]


def _tile(address: int, num_bytes: int, host: np.ndarray, stream: int) -> None:
    """Fills device memory with copies of a host array, one after the other."""
    from cupy.cuda import runtime

    done = min(num_bytes, host.nbytes)
    runtime.memcpyAsync(address, host.ctypes.data, done, runtime.memcpyHostToDevice, stream)
    runtime.streamSynchronize(stream)  # `host` may be gone after this call
    while done < num_bytes:
        more = min(done, num_bytes - done)
        runtime.memcpyAsync(address + done, address, more, runtime.memcpyDeviceToDevice, stream)
        done += more


@cache
def _pattern(dtype: str) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(PATTERN, np.float32)
    return values.astype(DTYPES[dtype])
