"""The cores of this machine: how many a process may use, work in as many threads, those of BLAS, and a rank's own.

OpenBLAS starts a thread for each core and lets them wait for each other in a busy loop. Where other processes need the
cores, that loop takes what the working threads lack: on two busy cores, training ran at 199 tokens/s with two threads
and at 4,308 with one. So it gets as many as there are free cores; what the user sets in the environment counts.

A rank runs on the cores beside its GPU, or on its share of the CPU. Memory needs no setting of its own: Linux gives a
process pages of the NUMA node on whose cores it first writes them.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

SET_BY = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
PREFIXES = ("scipy_openblas_", "openblas_")  # of NumPy's wheels, and of a system's library
NAMES = ("{}_num_threads64_", "{}_num_threads")  # of OpenBLAS with 64-bit integers, and without
T = TypeVar("T")


def num_cores() -> int:
    """CPU cores that this process may use: its affinity, and a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, round(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores that the container's quota is worth; None without one. `root` is where sys is mounted."""
    group = root / "sys/fs/cgroup"
    try:
        quota, period = (group / "cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        try:
            quota, period = ((group / "cpu" / f"cpu.cfs_{name}_us").read_text("ascii") for name in ("quota", "period"))
        except OSError:
            return None
    try:
        return float(quota) / float(period) if float(quota) > 0 and float(period) > 0 else None
    except ValueError:  # "max"
        return None


def free_cores(root: Path = Path("/")) -> int:
    """Cores that are left to this process by what else is running, at least 1. `root` is where proc is mounted."""
    try:
        words = (root / "proc/loadavg").read_text("ascii").split()
        # The mean of a minute still has what has ended; what runs at the moment (this process is one) may be a blip.
        busy: float = max(min(float(words[0]), int(words[3].partition("/")[0]) - 1), 0)
    except (OSError, ValueError, IndexError):
        busy = 0.0
    idle = (os.cpu_count() or 1) - busy
    return max(1, min(num_cores(), round(idle)))


def in_threads(function: Callable[[T], Any], items: Sequence[T], most: int = 64) -> None:
    """Calls a function of each item, in as many threads as this process has cores and `most` at most: for what leaves
    Python's lock, as NumPy's loops and calls of the system do.

    The first error is raised, and of the items after it those are left out whose turn has not come.
    """
    count = min(num_cores(), len(items), most)
    if count <= 1:
        for item in items:
            function(item)
        return
    pool = ThreadPoolExecutor(count, "llmq-work")
    try:
        for _ in pool.map(function, items):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def use_blas_threads(earlier: int | None = None) -> int | None:
    """Sets the threads of BLAS to the `earlier` number of a run, or to the free cores; returns how many there are.

    The user's environment comes first. None for a library that cannot be asked. The bits of a product depend on it, so
    a process that asks again gets the number that it got before.
    """
    if (library := _openblas()) is None:
        return None
    set_threads, get_threads = library
    if not _set_by():
        set_threads(earlier or _free_at_first())
    return get_threads()


def blas_in_words() -> str:
    """`scipy-openblas 0.3.30, 1 thread on 2 cores`, with what set it."""
    import numpy as np

    about = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    name = f"{about.get('name', 'unknown')} {about.get('version', '')}".strip()
    if (library := _openblas()) is None:
        return name
    threads, cores, by = library[1](), num_cores(), f" ({_set_by()})" if _set_by() else ""
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}{by} on {cores} core{'s' if cores > 1 else ''}"


def _set_by() -> str | None:
    return next((variable for variable in SET_BY if os.environ.get(variable)), None)


@cache
def _free_at_first() -> int:
    return free_cores()


@cache
def _openblas() -> tuple[Callable[[int], Any], Callable[[], int]] | None:
    """What sets and gets the threads of the OpenBLAS that NumPy has loaded; None for another BLAS, or one unknown."""
    try:
        maps = Path("/proc/self/maps").read_text("utf-8", errors="replace")
    except OSError:
        return None
    for path in dict.fromkeys(line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in map("".join, product(PREFIXES, NAMES)):
            if hasattr(library, name.format("set")) and hasattr(library, name.format("get")):
                return getattr(library, name.format("set")), getattr(library, name.format("get"))
    return None


def cores_of_ranks(num: int, gpus: list[str] | None, root: Path = Path("/")) -> list[frozenset[int]]:
    """The cores of each of `num` ranks: an empty set leaves a rank where it is.

    `gpus` has the PCI address of each rank's GPU (0000:18:00.0), or is None for ranks on the CPU, which get equal
    shares of the cores that this process may use. `root` is where sys is mounted.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return [frozenset()] * num
    allowed = frozenset(os.sched_getaffinity(0))
    if gpus is not None:
        return [_cores_beside(address, root) & allowed for address in gpus]
    order, each = sorted(allowed), max(1, len(allowed) // num)
    return [frozenset(order[(i * each) % len(order) :][:each]) for i in range(num)]


def _cores_beside(address: str, root: Path) -> frozenset[int]:
    """The cores of the NUMA node that a PCI device hangs on; none where the system does not tell."""
    try:
        return read_cores((root / "sys/bus/pci/devices" / address / "local_cpulist").read_text("ascii").strip())
    except OSError:
        return frozenset()


def read_cores(text: str) -> frozenset[int]:
    """The numbers of `0-3,8`."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))
