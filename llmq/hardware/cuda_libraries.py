"""NVIDIA's libraries in this environment: which are missing or do not fit together, and the versions that are loaded.

All of them come from pip (the extras `cuda12` and `cuda13`); one of the system is taken where the wheel is absent.
cuda-pathfinder finds and loads them, as CuPy and nvmath do themselves. cudnn-frontend looks in one folder only, then
takes what is loaded: so everything is loaded here, before any of them is imported. None of this starts CUDA.
"""

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from llmq.hardware.cuda_driver import DRIVERS, Problem

CUPY = {12: "cupy-cuda12x", 13: "cupy-cuda13x"}
PYTHON_PACKAGES = ("cuda-bindings", "nvmath-python", "nvidia-cudnn-frontend")


@dataclass(frozen=True)
class Library:
    """A shared library: its title, its name in cuda-pathfinder, and its packages by CUDA version."""

    title: str
    name: str
    packages: dict[int, str]
    has_cuda_version: bool = True  # in its file name: else both packages are one file, and the later one wins


LIBRARIES = (
    Library("cuBLASLt", "cublasLt", {12: "nvidia-cublas-cu12", 13: "nvidia-cublas"}),
    Library("NVRTC", "nvrtc", {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}),
    Library("cuDNN", "cudnn", {12: "nvidia-cudnn-cu12", 13: "nvidia-cudnn-cu13"}, has_cuda_version=False),
    Library("NCCL", "nccl", {12: "nvidia-nccl-cu12", 13: "nvidia-nccl-cu13"}, has_cuda_version=False),
)


def extra(driver_cuda: tuple[int, int]) -> str:
    """The extra of llmq-train for a driver that runs CUDA up to `driver_cuda`."""
    return f"cuda{max(major for major in CUPY if major <= driver_cuda[0])}"


def problem(driver_cuda: tuple[int, int]) -> Problem | None:
    """What keeps the CUDA backend from running with this driver; None, and everything loaded, if nothing does."""
    what, fix = _wrong(driver_cuda) or ("", "")
    return Problem(what, fix, has_gpu=True) if what else None


def _wrong(driver_cuda: tuple[int, int]) -> tuple[str, str] | None:
    """What is wrong, and the fix."""
    install = f"pip install 'llmq-train[{extra(driver_cuda)}]'"
    cupies = [name for name in CUPY.values() if installed(name)]
    if len(cupies) > 1:
        fix = f"pip uninstall -y {' '.join(cupies)}, then {install}"
        return f"{' and '.join(cupies)} are both installed and break each other", fix
    if not cupies and not installed("cupy"):
        return "CuPy is not installed", install
    major = next((major for major, name in CUPY.items() if name in cupies), min(driver_cuda[0], max(CUPY)))
    if major > driver_cuda[0]:
        runs = f"this one runs CUDA {driver_cuda[0]}.{driver_cuda[1]} at most"
        fix = f"update the driver, or pip uninstall -y {cupies[0]} and {install}"
        return f"{cupies[0]} needs NVIDIA driver {DRIVERS[major]} or later, and {runs}", fix
    install = f"pip install 'llmq-train[cuda{major}]'"
    missing = [name for name in PYTHON_PACKAGES if not installed(name)]
    for library in LIBRARIES:
        packages = [name for name in library.packages.values() if installed(name)]
        if not library.has_cuda_version and len(packages) > 1:
            what = f"{' and '.join(packages)} are both installed, in one place"
            return what, f"{install} in a new environment"
        foreign = not library.has_cuda_version and packages and packages != [library.packages[major]]
        path = None if foreign else load(library.name)
        if path is None:
            missing.append(f"{library.title} ({library.packages[major]})")
            continue
        found = re.search(r"\.so\.(\d+)", path)
        if library.has_cuda_version and found and int(found[1]) != major:
            what = f"CuPy is for CUDA {major}, and the {library.title} that is found for {found[1]} ({path})"
            return what, f"{install} in a new environment"
    if missing:
        return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing", install
    bindings = installed("cuda-bindings") or ""
    if bindings.partition(".")[0] != str(major):
        return f"cuda-bindings {bindings} is not for CUDA {major}, as CuPy is", install
    return None


@cache
def installed(package: str) -> str | None:
    """Version of an installed distribution; None if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def load(name: str) -> str | None:
    """Loads a library by cuda-pathfinder's name for it, with what it depends on; its path, or None if it is nowhere."""
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError:  # comes with CuPy
        return None
    try:
        path = load_nvidia_dynamic_lib(name).abs_path
    except (DynamicLibNotFoundError, OSError):
        return None
    return str(path) if path is not None else None


def versions() -> dict[str, str]:
    """Versions of the libraries themselves, asked of those that are loaded, and of the packages that call them."""
    found = {}
    for title, name, ask in (
        ("CUDA runtime", "cudart", lambda it: _parts(_told(it.cudaRuntimeGetVersion), 1000, 10)[:2]),
        ("cuBLASLt", "cublasLt", lambda it: _parts([it.cublasLtGetVersion()], 10000, 100)),
        ("cuDNN", "cudnn", lambda it: _parts([it.cudnnGetVersion()], 10000, 100)),
        ("NVRTC", "nvrtc", lambda it: _told(it.nvrtcVersion, 2)),
        ("NCCL", "nccl", lambda it: _parts(_told(it.ncclGetVersion), 10000, 100)),
    ):
        if path := load(name):
            found[title] = ".".join(map(str, ask(ctypes.CDLL(path))))
    for package in ("cupy", *CUPY.values(), *PYTHON_PACKAGES):
        if number := installed(package):
            found[package] = number
    return found


def _told(function: Any, count: int = 1) -> list[int]:
    """The numbers that a function writes to the addresses that it is given."""
    numbers = [ctypes.c_int() for _ in range(count)]
    function(*map(ctypes.byref, numbers))
    return [number.value for number in numbers]


def _parts(numbers: list[int], major: int, minor: int) -> list[int]:
    """9, 28, 0 of 92800."""
    (number,) = numbers
    return [number // major, number % major // minor, number % minor]
