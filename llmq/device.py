"""The device of a run: which one, what it is, how much memory it has, and how fast it can multiply.

This is the one place where a backend is chosen. There is one so far, the NumPy reference on the CPU.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmq.errors import UsageError

if TYPE_CHECKING:
    from llmq.options import SystemOptions

# module: distribution, where the names differ
LIBRARIES = {
    **dict.fromkeys(("numpy", "ml_dtypes", "tokenizers", "safetensors", "huggingface_hub", "pyarrow", "pydantic"), ""),
    "yaml": "PyYAML",
}
MEBIBYTE = 2**20
PEAK_SECONDS = 0.15  # of measuring
PEAK_SIZES = (256, 512, 1024)  # of square matrices; one that would take longer than all the time is left out


def cuda_problem() -> str | None:
    """Why no CUDA device can be used, asked of the driver itself; None if one can."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver (libcuda.so.1)"
    code, count = driver.cuInit(0), ctypes.c_int(0)
    if code or driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"the NVIDIA driver does not start (cuInit returned {code})"
    return None if count.value else "the NVIDIA driver sees no GPU"


def pick_device(options: SystemOptions) -> str:
    """The device to compute on, as the options ask; see `pick`."""
    return pick(options.device)


def pick(device: str) -> str:
    """`cpu` for auto or cpu. UsageError for cuda."""
    if device == "cuda":
        problem = cuda_problem() or "this version has no CUDA backend"
        raise UsageError(f"--device cuda: {problem}: use --device cpu (or auto)")
    return "cpu"


def seed_of(options: SystemOptions) -> int:
    """The seed of everything random in a run."""
    return options.seed


def system_facts(device: str = "cpu") -> dict[str, Any]:
    """What a run runs on, for the log: device, memory, system, and the libraries that are loaded."""
    assert device == "cpu"
    total, free = memory_bytes()
    facts = {
        "device": f"cpu: {cpu_name()}",
        "cores": num_cores(),
        "memory": f"{(total - free) // MEBIBYTE} MiB / {total // MEBIBYTE} MiB",
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for module, distribution in LIBRARIES.items():
        if module in sys.modules:
            try:
                facts[distribution or module] = version(distribution or module)
            except PackageNotFoundError:  # on the path without being installed
                facts[distribution or module] = str(getattr(sys.modules[module], "__version__", "unknown"))
    facts["blas"] = blas()
    return facts


def blas() -> str:
    """The BLAS that NumPy multiplies with: `scipy-openblas 0.3.30`."""
    found = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    return f"{found.get('name', 'unknown')} {found.get('version', '')}".strip()


def cpu_name() -> str:
    """Name of the processor, as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """(total, free) bytes of host memory that this process may use, with a container's limit.

    Where the system does not say what is free, all of it is. `root` is where proc and sys are mounted.
    """
    total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = (root / "proc/meminfo").read_text("ascii").splitlines()
        sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError):
        pass
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most = int((root / "sys/fs/cgroup" / limit).read_text("ascii"))
            now = int((root / "sys/fs/cgroup" / used).read_text("ascii"))
        except (OSError, ValueError):  # no such cgroup version, or no limit ("max")
            continue
        total, free = min(total, most), min(free, max(most - now, 0))
    return total, free


def peaks(device: str = "cpu") -> dict[str, float]:
    """Peak FLOP/s by dtype. The reference backend computes in f32, or f64, whatever the storage."""
    assert device == "cpu"
    rate = measured_peak("fp32")
    return {**dict.fromkeys(("fp32", "bf16", "e4m3"), rate), "fp64": rate / 2}


@cache
def measured_peak(dtype: str) -> float:
    """FLOP/s of NumPy's matrix product, the best of a fifth of a second; measured once per process.

    There is no data sheet to ask: clock, cores and vector width that a container really gets are only seen in use.
    """
    best = 0.0
    for size in PEAK_SIZES:
        if best and 2 * size**3 / best > PEAK_SECONDS:
            break
        a = np.ones((size, size), {"fp32": np.float32, "fp64": np.float64}[dtype])
        out = np.empty_like(a)
        np.matmul(a, a, out=out)
        deadline = time.perf_counter() + PEAK_SECONDS / len(PEAK_SIZES)
        while (start := time.perf_counter()) < deadline:
            np.matmul(a, a, out=out)
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best
