"""Host memory: how much of it a process may use, and large blocks that threads bring into being, on a NUMA node.

A page comes into being when it is first written, and is then zero. In a virtual machine one thread brings 1.2 GB/s of
pages of 4 KiB into being, and 10 GB/s of huge ones. A call that pins memory would do that in one thread as it goes
along; pages that are there already it only locks.

The memory of some virtual machines (virtio-mem, balloons) grows as it is used: MemTotal is then what they have so far.
What they may have is a container's limit, where it has one, or `--host-memory-limit`; else what they have now. Their
pages are written no faster than there is room for them, so that the kernel has no reason to end the process.
"""

import ctypes
import mmap
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from llmq.disk import shown
from llmq.errors import RefusedMemoryError
from llmq.hardware.cores import in_threads

CHUNK_BYTES = 64 << 20  # that one thread brings into being at a time
THREADS = 8  # more wait for each other in the kernel
POLL_S = 0.1
# Without more room: what other threads have begun is over, or a machine has not grown.
WAIT_S = {False: 2.0, True: 20.0}  # by whether it may grow
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
PREFERRED = 1  # MPOL_PREFERRED
MBIND = {"x86_64": 237, "aarch64": 235}  # number of the system call
NODES = 1024  # bits of a mask
MEMORY_DRIVERS = ("virtio_mem", "virtio_balloon")
# cgroup v1 has no word for "no limit": its files then have the last page below 2^63, of whatever size the pages are.
NO_LIMIT = 1 << 62
# (hierarchy below sys/fs/cgroup, names of its files, the cached files that the kernel takes back in memory.stat)
CGROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def host_memory_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """(total, free) bytes of host memory that this process may use, with the limits of its containers.

    Where the system does not report what is free, all of it counts as free. What a container holds of files that it has
    read is free: the kernel takes it back before it ends a process. A machine that grows has what its containers may
    have. `root` is where proc and sys are mounted.
    """
    total, free = _machine_bytes(root)
    limits = list(_limits(root))
    if limits and may_grow(root) and min(most for most, _ in limits) > total:
        total = min(most for most, _ in limits)
        return total, min(left for _, left in limits)
    for most, left in limits:
        total, free = min(total, most), min(free, left)
    return total, free


def free_now_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that are there to be written at this moment."""
    return min((_machine_bytes(root)[1], *(left for _, left in _limits(root))))


def may_grow(root: Path = Path("/")) -> bool:
    """Whether this is a virtual machine to which its host may give more memory while it runs."""
    drivers = root / "sys/bus/virtio/drivers"
    return any(any((drivers / name).glob("virtio*")) for name in MEMORY_DRIVERS)


def numa_node(address: str, root: Path = Path("/")) -> int | None:
    """The NUMA node that a PCI device (0000:18:00.0) hangs on; None if there is one node, or it is not known."""
    if len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    try:
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text("ascii"))
    except (OSError, ValueError):
        return None
    return node if 0 <= node < NODES else None


def reserved(num_bytes: int) -> np.ndarray:
    """Addresses of `num_bytes`, whose pages come into being when they are written: huge ones, where there are any.

    MemoryError where the system does not give them out. The addresses are free again when all views of them are gone.
    """
    try:
        block = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{shown(num_bytes)}: {error}") from error
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a forked process would get a copy of what is locked
        if hasattr(mmap, name):
            with suppress(OSError):  # a kernel without huge pages
                block.madvise(getattr(mmap, name))
    return np.frombuffer(block, np.uint8, num_bytes)


def bind(block: np.ndarray, node: int) -> bool:
    """Has pages that come into being from now on taken from a NUMA node as long as it has any; False if refused.

    No strict binding: with that the kernel ends a process when the node is full, though another one has room.
    """
    number, library = MBIND.get(os.uname().machine), _library()
    if number is None:
        return False
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (NODES // width))()
    mask[node // width] = 1 << node % width
    place, size = ctypes.c_void_p(block.ctypes.data), ctypes.c_size_t(block.nbytes)
    return not library.syscall(ctypes.c_long(number), place, size, PREFERRED, mask, ctypes.c_ulong(NODES), 0)


def write_pages(blocks: Sequence[np.ndarray], root: Path = Path("/")) -> None:
    """Brings all pages of new blocks into being, in several threads.

    RefusedMemoryError if the machine has less memory, before the kernel would end the process.
    """
    total, grows = sum(block.nbytes for block in blocks), may_grow(root)
    free = host_memory_bytes(root)[1]
    if total > free and not grows:
        raise refused(total, free)
    room = _Room(total, root, WAIT_S[grows])

    def write(chunk: np.ndarray) -> None:
        with room.taken(chunk.nbytes):
            _write(chunk)

    in_threads(write, [chunk for block in blocks for chunk in _chunks(block)], THREADS)


def _chunks(block: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, block.nbytes, CHUNK_BYTES):
        yield block[start : start + CHUNK_BYTES]


def _write(chunk: np.ndarray) -> None:
    """A system call where the kernel has one for it, which is faster than a write for every page."""
    if _library().madvise(ctypes.c_void_p(chunk.ctypes.data), ctypes.c_size_t(chunk.nbytes), POPULATE_WRITE):
        chunk.fill(0)


class _Room:
    """Memory that the machine has now, less what threads are about to write."""

    def __init__(self, total: int, root: Path, wait_s: float) -> None:
        self._total, self._root, self._wait_s = total, root, wait_s
        self._lock, self._begun, self._done = Lock(), 0, 0

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Waits for this much room, and keeps it; RefusedMemoryError if no more comes free for a while."""
        most, since = 0, time.monotonic()
        while True:
            with self._lock:
                free = free_now_bytes(self._root)
                if free - self._begun >= num_bytes:
                    self._begun += num_bytes
                    break
            if free > most:
                most, since = free, time.monotonic()
            elif time.monotonic() - since > self._wait_s:
                raise refused(self._total, free + self._done)
            time.sleep(POLL_S)
        try:
            yield
        finally:
            with self._lock:
                self._begun, self._done = self._begun - num_bytes, self._done + num_bytes


def refused(num_bytes: int, free_bytes: int) -> RefusedMemoryError:
    """The error for host memory that there is not."""
    return RefusedMemoryError(
        f"the host refused {shown(num_bytes)}", home="host", num_bytes=num_bytes, free_bytes=free_bytes
    )


def _machine_bytes(root: Path) -> tuple[int, int]:
    """(total, free) bytes as the kernel counts them."""
    lines = _lines(root / "proc/meminfo")
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    if {"MemTotal", "MemAvailable"} <= sizes.keys():
        return sizes["MemTotal"], sizes["MemAvailable"]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, free) bytes of each cgroup that this process is in and that has a limit."""
    for hierarchy, limit, used, cached in CGROUPS:
        top = root / "sys/fs/cgroup" / hierarchy
        own = top / _own_group(root, hierarchy)
        for group in (own, *own.parents):
            try:
                most, now = (int((group / name).read_text("ascii")) for name in (limit, used))
            except (OSError, ValueError):  # no such cgroup version, no limit ("max"), or a path outside the container
                most = now = 0
            if 0 < most < NO_LIMIT:
                yield most, max(most - max(now - _counted(group / "memory.stat", cached), 0), 0)
            if group == top:
                break


def _own_group(root: Path, hierarchy: str) -> str:
    """The path of this process in a hierarchy of cgroups; empty where the kernel does not list it."""
    found = (line.split(":", 2) for line in _lines(root / "proc/self/cgroup") if line.count(":") >= 2)
    return next((path.strip("/") for _, names, path in found if hierarchy in names.split(",")), "")


def _counted(statistics: Path, name: str) -> int:
    """A number of a cgroup's memory.stat; 0 if it is not there."""
    return next((int(line.split()[1]) for line in _lines(statistics) if line.startswith(f"{name} ")), 0)


def _lines(path: Path) -> list[str]:
    """Lines of a file of the kernel; none where it is not there."""
    try:
        return path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []


@cache
def _library() -> Any:
    """The C library; its calls leave Python's lock."""
    return ctypes.CDLL(None, use_errno=True)


def peak_resident_bytes(root: Path = Path("/")) -> int:
    """Largest resident size of this process, bytes. `root` is where proc is mounted.

    Linux keeps getrusage's figure over an exec: a small program that a large one starts would show the large one's.
    """
    for line in _lines(root / "proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
