"""Memory of the GPU, and of the host in pages that the GPU copies from: asked for, refused, given back."""

import ctypes
import re
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from mmap import PAGESIZE
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from llmq.disk import shown
from llmq.errors import RefusedMemoryError
from llmq.hardware.cores import in_threads
from llmq.hardware.host_memory import bind, host_memory_bytes, numa_node, refused, reserved, write_pages
from llmq.ops.cuda.algorithms import OUT_OF_MEMORY

PAGE_BYTES = 2 << 20  # a smaller allocation may be part of one that a handle for other processes stands for
PIECE_BYTES = 1 << 30  # of host memory that is locked at a time
LOCKING_THREADS = 4
PORTABLE, MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped; cudaHostAlloc has the same
WRITE_COMBINED = 4  # cudaHostAllocWriteCombined
SAME_ADDRESS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
# cudaErrorMemoryAllocation, ...OperatingSystem, ...NotPermitted, ...NotSupported
LOCK_REFUSALS = (OUT_OF_MEMORY, 304, 800, 801)
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


def give_back_with(owner: object, give_back: Callable[[int], None], address: int, stream: Any) -> None:
    """Gives memory back when its owner is gone, after the work on the stream. At exit the driver frees it."""

    def done() -> None:
        stream.synchronize()
        give_back(address)

    # Not in __del__: an engine that a failed run leaves in a cycle is collected together with its stream, which CuPy
    # may destroy first. Waiting for it then ends the process. A finalizer keeps the stream alive.
    weakref.finalize(owner, done).atexit = False


class HostBlock:
    """Host memory for arrays of `sizes` bytes one after the other, near the GPU, locked in pieces of at least
    `piece_bytes`: no array is in two of them, as the driver refuses a copy that is.

    Its pages are brought into being by threads before they are locked; a call of CUDA that does both takes one thread.
    What the system refuses to lock is used all the same. Views are valid as long as there are any; they are unlocked
    when no view of their piece is left and the stream has done its work. RefusedMemoryError where the host has too
    little.

    With `write_combined` the driver allocates them, which puts them where it likes, past the caches of the CPU, which
    reads them very slowly; ordinary memory where it refuses (`is_combined`).
    """

    def __init__(
        self, sizes: Sequence[int], stream: Any, piece_bytes: int = PIECE_BYTES, *, write_combined: bool = False
    ) -> None:
        begun = time.perf_counter()
        self.num_bytes = sum(sizes)
        self._starts = piece_starts(sizes, piece_bytes)
        lengths = [end - start for start, end in pairwise([*self._starts, self.num_bytes])]
        combined = _combined(lengths, stream) if write_combined else None
        self.is_combined, self.unpinned_bytes = combined is not None, 0
        if combined is not None:
            self._pieces, self._place = combined, ", write-combined"
            self._seconds = {"pinned": time.perf_counter() - begun}
            return
        self._pieces = [reserved(length) for length in lengths]
        device = runtime.getDevice()
        node = numa_node(runtime.deviceGetPCIBusId(device).lower())
        self._place = ""
        if node is not None:
            is_bound = all(bind(piece, node) for piece in self._pieces)
            self._place = f", on NUMA node {node}" if is_bound else f", not bound to NUMA node {node}: refused"
        write_pages(self._pieces)
        written = time.perf_counter()
        unlocked: list[int] = []

        def lock(piece: np.ndarray) -> None:
            runtime.setDevice(device)  # of this thread
            if not _lock(piece, stream):
                unlocked.append(piece.nbytes)

        in_threads(lock, self._pieces, LOCKING_THREADS)
        self.unpinned_bytes = sum(unlocked)
        self._seconds = {"written": written - begun, "pinned": time.perf_counter() - written}

    def view(self, offset: int, num_bytes: int) -> np.ndarray:
        """Bytes of one array, from its offset on."""
        if not self._pieces:
            return np.empty(0, np.uint8)
        index = bisect_right(self._starts, offset) - 1
        first = offset - self._starts[index]
        found = self._pieces[index][first : first + num_bytes]
        assert found.nbytes == num_bytes, f"{num_bytes} bytes at {offset} are in two pieces"
        return found

    def __str__(self) -> str:
        rates = (
            f"{name} in {seconds:.1f} s ({self.num_bytes / max(seconds, 1e-9) / 1e9:.1f} GB/s)"
            for name, seconds in self._seconds.items()
        )
        return f"Host memory: {shown(self.num_bytes)} in {len(self._pieces)} pieces{self._place}: {', '.join(rates)}"


def piece_starts(sizes: Sequence[int], piece_bytes: int) -> list[int]:
    """Where pieces of at least `piece_bytes` begin, so that each array is in one; none where there are no bytes."""
    starts, end = [0], 0
    for size in sizes:
        if end - starts[-1] >= piece_bytes and size:
            starts.append(end)
        end += size
    return starts if end else []


def _combined(lengths: Sequence[int], stream: Any) -> list[np.ndarray] | None:
    """Write-combined pieces, which are free again when all views of them are gone; None where the driver refuses.

    RefusedMemoryError where the host has less free.
    """
    free = host_memory_bytes()[1]
    if sum(lengths) > free:
        raise refused(sum(lengths), free)
    pieces = []
    for length in lengths:
        try:
            address = int(runtime.hostAlloc(length, PORTABLE | MAPPED | WRITE_COMBINED))
        except runtime.CUDARuntimeError as error:
            if error.status not in LOCK_REFUSALS:
                raise
            return None
        block: Any = (ctypes.c_uint8 * length).from_address(address)
        pieces.append(np.frombuffer(block, np.uint8))
        give_back_with(pieces[-1], runtime.freeHost, address, stream)
    return pieces


def has_same_addresses() -> bool:
    """Whether kernels of the current device read locked host memory by the addresses that the host has for it."""
    return bool(runtime.deviceGetAttribute(SAME_ADDRESS, runtime.getDevice()))


def _lock(piece: np.ndarray, stream: Any) -> bool:
    """Locks the pages of an array until it is gone; False where the system refuses to."""
    address = piece.ctypes.data
    try:
        runtime.hostRegister(address, -(-piece.nbytes // PAGESIZE) * PAGESIZE, PORTABLE | MAPPED)
    except runtime.CUDARuntimeError as error:
        if error.status not in LOCK_REFUSALS:
            raise
        return False
    give_back_with(piece, runtime.hostUnregister, address, stream)
    return True


def pinned(num_bytes: int) -> tuple[np.ndarray, bool]:
    """A small buffer of page-locked host memory, or ordinary memory where the system refuses; and whether it is locked.

    RefusedMemoryError where the host has less free: the kernel would end the process when it is written.
    """
    try:
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(num_bytes), np.uint8, num_bytes), True
    except (runtime.CUDARuntimeError, MemoryError) as error:
        free = host_memory_bytes()[1]
        if num_bytes <= free:
            return np.empty(num_bytes, np.uint8), False
        raise refused(num_bytes, free) from error


@contextmanager
def told_of_refusals() -> Iterator[None]:
    """Within it an error that says that the GPU's memory is full is a RefusedMemoryError."""
    try:
        yield
    except RefusedMemoryError:
        raise
    except Exception as error:
        is_cuda = isinstance(error, runtime.CUDARuntimeError)
        if getattr(error, "status", None) == OUT_OF_MEMORY if is_cuda else REFUSALS.search(f"{error}"):
            raise RefusedMemoryError(
                f"the GPU refused memory to CUDA or one of its libraries ({error})",
                free_bytes=int(runtime.memGetInfo()[0]),
            ) from error
        raise
