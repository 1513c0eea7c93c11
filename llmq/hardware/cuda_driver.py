"""The NVIDIA driver, asked through ctypes: its version, the GPUs that CUDA may use, why there are none, free memory.
And NVIDIA's libraries in this environment: which are missing or do not fit together, the versions that are loaded.

Asking the driver needs nothing installed but itself, so that it answers before any CUDA package is there. Its own
library respects what NVML does not: CUDA_VISIBLE_DEVICES, WSL2, and packages for forward compatibility.

The libraries come from pip (the extras `cuda12` and `cuda13`); one of the system is taken where the wheel is absent.
cuda-pathfinder finds and loads them, as CuPy and nvmath do themselves. cudnn-frontend looks in one folder only, then
takes what is loaded: so everything is loaded here, before any of them is imported. None of this starts CUDA.
"""

import ctypes
import os
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

LIBRARY = "libcuda.so.1"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
MISMATCH = (803, 804)  # CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
NUM_SMS, MAJOR, MINOR = 16, 75, 76  # CU_DEVICE_ATTRIBUTE_...
# CUDA 12 came with driver 525, CUDA 13 with 580: a driver runs every program of its major version.
OLDEST_CUDA = (12, 0)
DRIVERS = {12: 525, 13: 580}
CONTAINER = "start a container with --gpus all"
OLDEST_CAPABILITY = (8, 0)  # bf16 tensor cores and asynchronous copies


@dataclass(frozen=True)
class Problem:
    """What keeps a GPU from being used, and what to do. `has_gpu` is true where there is one all the same."""

    what: str
    fix: str
    has_gpu: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.fix}"


@dataclass(frozen=True)
class Gpu:
    """A GPU as CUDA numbers them."""

    index: int
    name: str
    uuid: str  # GPU-8-4-4-4-12, as NVML and nvidia-smi write it; a part of a GPU (MIG) has its own
    capability: tuple[int, int]
    num_sms: int
    total_bytes: int


@dataclass(frozen=True)
class Driver:
    """The driver. `cuda` is the newest CUDA version it runs, `version` its own (580.65.06), None where it is not known.

    Of a driver that is too old there is only the number of its GPUs.
    """

    cuda: tuple[int, int]
    version: str | None
    gpus: tuple[Gpu, ...]
    failure: int = 0  # what cuInit returned
    failure_name: str = ""
    num_gpus: int = 0

    def __str__(self) -> str:
        return f"{self.version or ''} (CUDA {dotted(self.cuda)})".lstrip()


@cache
def load() -> Any:
    """The driver's library; None if there is none."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def cuda_version() -> tuple[int, int] | None:
    """The newest CUDA version that the driver runs; None without a driver. Starts nothing."""
    library, number = load(), ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(number)) or number.value <= 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def read(root: Path = Path("/")) -> Driver | None:
    """The driver and its GPUs; None if there is no driver. Starts CUDA, but makes no context. `root` holds sys."""
    library, cuda = load(), cuda_version()
    if library is None or cuda is None:
        return None
    try:
        version = (root / "sys/module/nvidia/version").read_text("ascii").strip() or None
    except OSError:  # WSL2, and containers without it
        version = None
    failure = library.cuInit(0)
    if failure:
        return Driver(cuda, version, (), failure, _error_name(library, failure))
    count = _asked(library.cuDeviceGetCount)
    # drivers before CUDA 11.4 lack functions that `_gpu` calls
    known = range(count.value if cuda >= OLDEST_CUDA else 0)
    return Driver(cuda, version, tuple(_gpu(library, index) for index in known), num_gpus=count.value)


def problem(driver: Driver | None) -> Problem | None:
    """Why no GPU of this driver can be used; None if the first one can."""
    if driver is None:
        return Problem(f"there is no NVIDIA driver ({LIBRARY})", f"install the driver of your GPU; {CONTAINER}")
    name, hidden = f"the NVIDIA driver {driver}", os.environ.get("CUDA_VISIBLE_DEVICES")
    if driver.cuda < OLDEST_CUDA:
        fix = f"install driver {DRIVERS[max(DRIVERS)]} or later ({DRIVERS[OLDEST_CUDA[0]]} at least)"
        return Problem(f"{name} is too old for CUDA {OLDEST_CUDA[0]}", fix, has_gpu=driver.num_gpus > 0)
    if driver.failure in MISMATCH:
        fix = "restart the machine; in a container, remove its cuda-compat package"
        return Problem(f"{name} and its library do not fit together ({driver.failure_name})", fix)
    if driver.failure not in (0, NO_DEVICE):
        fix = "see what nvidia-smi says; restarting the machine often helps"
        return Problem(f"{name} does not start ({driver.failure_name})", fix)
    if not driver.gpus and hidden is not None:
        fix = "unset it, or name a GPU that nvidia-smi -L lists"
        return Problem(f"CUDA_VISIBLE_DEVICES={hidden} leaves no GPU to {name}", fix)
    if not driver.gpus:
        return Problem(f"{name} sees no GPU", f"check nvidia-smi -L; {CONTAINER}")
    first, least = driver.gpus[0], OLDEST_CAPABILITY
    if first.capability >= least:
        return None
    able = next((gpu for gpu in driver.gpus if gpu.capability >= least), None)
    other = f"CUDA_VISIBLE_DEVICES={able.uuid} takes the {able.name} instead" if able else ""
    what = f"{first.name} has compute capability {dotted(first.capability)}, below {dotted(least)}"
    return Problem(what, other or "use a GPU of the A100, the RTX 30 series or later", has_gpu=True)


def memory_bytes(gpu: Gpu) -> tuple[int, int]:
    """(total, free) bytes of a GPU's memory as CUDA counts them. Makes the context that the run will use, and keeps it.

    OSError if the driver refuses, as it does when the GPU is full or another process owns it alone.
    """
    library = load()
    _check(library.cuInit(0))
    context = _asked(library.cuDevicePrimaryCtxRetain, _asked(library.cuDeviceGet, gpu.index), kind=ctypes.c_void_p)
    _check(library.cuCtxPushCurrent_v2(context))
    try:
        total = ctypes.c_size_t()
        free = _asked(library.cuMemGetInfo_v2, ctypes.byref(total), kind=ctypes.c_size_t)
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return total.value, free.value


def pci_address(index: int) -> str:
    """Where a GPU is on the PCI bus, as sysfs names it (0000:18:00.0); empty where the driver has none."""
    text, device = ctypes.create_string_buffer(32), _asked(load().cuDeviceGet, index)
    return "" if load().cuDeviceGetPCIBusId(text, len(text), device) else text.value.decode("ascii").lower()


def can_reach(index: int, other: int) -> bool:
    """Whether a GPU reads and writes another's memory without the host."""
    return bool(_asked(load().cuDeviceCanAccessPeer, index, other).value)


def dotted(version: tuple[int, int]) -> str:
    """`8.9` for (8, 9)."""
    return f"{version[0]}.{version[1]}"


def _gpu(library: Any, index: int) -> Gpu:
    device, name = _asked(library.cuDeviceGet, index), ctypes.create_string_buffer(256)
    _check(library.cuDeviceGetName(name, len(name), device))
    digits = bytes(_asked(library.cuDeviceGetUuid_v2, device, kind=ctypes.c_ubyte * 16)).hex()
    total = _asked(library.cuDeviceTotalMem_v2, device, kind=ctypes.c_size_t).value
    text = name.value.decode("utf-8", "replace")
    prefix = "MIG" if " MIG " in text else "GPU"
    uuid = "-".join((prefix, digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    attributes = (_asked(library.cuDeviceGetAttribute, one, device).value for one in (NUM_SMS, MAJOR, MINOR))
    num_sms, major, minor = attributes
    return Gpu(index, text, uuid, (major, minor), num_sms, total)


def _asked(function: Any, *arguments: Any, kind: Any = ctypes.c_int) -> Any:
    """What a function of the driver writes to the address that comes first; OSError if it refuses."""
    value = kind()
    _check(function(ctypes.byref(value), *arguments))
    return value


def _check(code: int) -> None:
    if code:
        raise OSError(f"the NVIDIA driver refuses: {_error_name(load(), code)}")


def _error_name(library: Any, code: int) -> str:
    text = ctypes.c_char_p()
    if library.cuGetErrorName(code, ctypes.byref(text)) or not text.value:
        return f"error {code}"
    return text.value.decode()


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


def library_problem(driver_cuda: tuple[int, int]) -> Problem | None:
    """What keeps the CUDA backend from running with this driver; None, and everything loaded, if nothing does."""
    found = _wrong(driver_cuda)
    return found and Problem(*found, has_gpu=True)


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
        runs = f"this one runs CUDA {dotted(driver_cuda)} at most"
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
        path = None if foreign else load_library(library.name)
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
        return version_of(package)
    except PackageNotFoundError:
        return None


def load_library(name: str) -> str | None:
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
        if path := load_library(name):
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
