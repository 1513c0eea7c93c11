"""Which algorithm runs each matrix product: a table, kept on disk between runs and stored with every run.

An algorithm is the 64 opaque bytes of a `cublasLtMatmulAlgo_t`, valid for one version of cuBLASLt; the same bytes give
the same bits. So the table belongs to a device (GPU name, multiprocessors, library version, what the library was asked
for), a run folder or checkpoint carries the part that the run used, and what is given from there comes before what the
disk says.

What is in no table is timed, on random data and with a cold L2 cache, as in a training step. Zeros would not do: the
tensor cores draw less power on them and run up to 13% faster. Nor would a warm cache, which favours algorithms that
read an operand often.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from llmq.disk import cache_folder, replace_file, shown
from llmq.errors import RefusedMemoryError
from llmq.tensor import DTYPES

ALGORITHM_BYTES = 64
FINALISTS, ROUNDS, REPEATS = 8, 3, 3
CLEARLY_SLOWER = 1.5  # than the best so far: not worth a second look
PATTERN = 1_048_573  # random numbers, repeated: a prime, so that no row repeats another
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
COMPARED_BYTES = 16 * 2**20  # of the result, at either end


@dataclass(frozen=True)
class Choice:
    """The answer for one problem, and what it was chosen from: time of the best and of the library's first proposal."""

    algorithm: str  # hexadecimal
    microseconds: float
    first_microseconds: float
    candidates: int

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.algorithm)) != ALGORITHM_BYTES:
            raise ValueError(f"an algorithm has {ALGORITHM_BYTES} bytes, not {len(self.algorithm) // 2}")


class Algorithms:
    """The table of one device. `given` is the `facts` of an earlier run, `folder` replaces the cache on disk."""

    def __init__(self, device: str, given: Mapping[str, Any] | None = None, folder: Path | None = None) -> None:
        self.device = device
        self.path = (folder or cache_folder("gemm")) / f"{re.sub(r'[^A-Za-z0-9.]+', '-', device)}.json"
        self.given_fits = True
        """Whether the earlier run's algorithms are for this device and all in use: if not, its bits are gone."""
        self._known = _read(self.path, device)
        self._given: dict[str, Choice] = {}
        if given is not None:
            self.take(given)
        self._used: dict[str, Choice] = {}
        self._new: dict[str, Choice] = {}

    def take(self, given: Mapping[str, Any]) -> None:
        """Computes as what has these `facts` did, or does: an earlier run, another rank."""
        self.given_fits = given.get("device") == self.device
        self._given = _choices(given) if self.given_fits else {}
        self._known |= self._given

    def find(self, problem: str) -> bytes | None:
        """The algorithm for a problem, None if it has yet to be chosen."""
        if problem not in self._known:
            return None
        self._used[problem] = self._known[problem]
        return bytes.fromhex(self._known[problem].algorithm)

    def add(self, problem: str, choice: Choice) -> None:
        """Notes what was chosen: for a problem of the earlier run, because the library refuses what that one had."""
        self.given_fits = self.given_fits and problem not in self._given
        self._known[problem] = self._used[problem] = self._new[problem] = choice

    def facts(self) -> dict[str, Any]:
        """The device and all that was used so far, as plain data for a run folder or checkpoint."""
        used = {problem: asdict(choice) for problem, choice in sorted(self._used.items())}
        return {"device": self.device, "algorithms": used}

    def save(self) -> str | None:
        """Adds what is new to the file on disk, whatever other processes wrote there meanwhile.

        Returns why that failed, if it did: a run does not need the cache, only its next start does.
        """
        if not self._new:
            return None
        merged = {p: asdict(c) for p, c in sorted((_read(self.path, self.device) | self._new).items())}
        content = {"device": self.device, "algorithms": merged, "digest": _digest(merged)}
        try:
            replace_file(self.path, json.dumps(content, indent=1).encode())
        except OSError as error:
            return f"GEMM algorithms are not kept for the next run: {self.path}: {error.strerror or error}"
        self._new = {}
        return None


def _choices(table: Mapping[str, Any]) -> dict[str, Choice]:
    return {str(problem): Choice(**choice) for problem, choice in table["algorithms"].items()}


def _read(path: Path, device: str) -> dict[str, Choice]:
    """The table in a file; empty if there is none, or if it is damaged: then it is made again."""
    try:
        content = json.loads(path.read_bytes())
        whole = content["device"] == device and content["digest"] == _digest(content["algorithms"])
        return _choices(content) if whole else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _digest(table: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


def fastest(
    launch: Callable[[int, dict[str, int]], bool],
    count: int,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, str | None],
    stream: int,
    what: str,
) -> tuple[int, float, float]:
    """Which of `count` candidates is fastest among those that give the same bits twice, its microseconds, the first's.

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
                return index, means[index], means.get(0, first.get(0, means[index]))
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
