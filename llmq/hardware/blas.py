"""Threads of NumPy's BLAS: as many as there are free cores.

OpenBLAS starts one for each core and lets them wait for each other in a busy loop. Where other processes need the
cores, that loop takes what the working threads lack: on two busy cores, training ran at 199 tokens/s with two threads
and at 4,308 with one. What the user sets in the environment counts.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

SET_BY = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
NAMES = ("{}_num_threads64_", "{}_num_threads")  # of OpenBLAS with 64-bit integers, and without
PREFIXES = ("scipy_openblas_", "openblas_")  # of NumPy's wheels, and of a system's library


def name() -> str:
    """The BLAS that NumPy multiplies with: `scipy-openblas 0.3.30`."""
    found = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    return f"{found.get('name', 'unknown')} {found.get('version', '')}".strip()


def use_threads(earlier: int | None = None) -> int | None:
    """Sets the threads of BLAS to the `earlier` number of a run, or to the free cores; returns how many there are.

    The user's environment comes first. None for a library that cannot be asked. The bits of a product depend on it, so
    a process that asks again gets the number that it got before.
    """
    library = _openblas()
    if library is None:
        return None
    if not _set_by():
        _function(library, "set")(earlier or _free_at_first())
    return num_threads()


def num_threads() -> int | None:
    """Threads of BLAS now; None for a library that cannot be asked."""
    library = _openblas()
    return None if library is None else int(_function(library, "get")())


def in_words() -> str:
    """`scipy-openblas 0.3.30, 1 thread on 2 cores`, with what set it."""
    threads, cores = num_threads(), num_cores()
    if threads is None:
        return name()
    by = f" ({_set_by()})" if _set_by() else ""
    return f"{name()}, {threads} thread{'s' if threads > 1 else ''}{by} on {cores} core{'s' if cores > 1 else ''}"


def _set_by() -> str | None:
    return next((variable for variable in SET_BY if os.environ.get(variable)), None)


@cache
def _free_at_first() -> int:
    return free_cores()


def num_cores() -> int:
    """CPU cores that this process may use: its affinity, and a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, round(quota)))


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


@cache
def _openblas() -> Any:
    """The OpenBLAS that NumPy has loaded; None for another BLAS, or where it is not found."""
    try:
        maps = Path("/proc/self/maps").read_text("utf-8", errors="replace")
    except OSError:
        return None
    for path in dict.fromkeys(line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line):
        try:
            library = ctypes.CDLL(path)
            _function(library, "set"), _function(library, "get")
            return library
        except (OSError, AttributeError):
            continue
    return None


def _function(library: Any, kind: str) -> Any:
    """`set` or `get` of the number of threads; AttributeError if the library has none."""
    names = [prefix + name.format(kind) for prefix in PREFIXES for name in NAMES]
    found = next((name for name in names if hasattr(library, name)), None)
    if found is None:
        raise AttributeError(f"none of {', '.join(names)}")
    return getattr(library, found)
