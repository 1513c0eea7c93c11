"""The NVIDIA driver, asked through ctypes: its version, the GPUs that CUDA may use, why there are none, free memory.

Needs nothing installed but the driver itself, so that it answers before any CUDA package is there. The driver's own
library respects what NVML does not: CUDA_VISIBLE_DEVICES, WSL2, and packages for forward compatibility.
"""

import ctypes
import os
from dataclasses import dataclass
from functools import cache
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
    count = ctypes.c_int()
    _check(library, library.cuDeviceGetCount(ctypes.byref(count)))
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
    device, context, free, total = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    _check(library, library.cuInit(0))
    _check(library, library.cuDeviceGet(ctypes.byref(device), gpu.index))
    _check(library, library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check(library, library.cuCtxPushCurrent_v2(context))
    try:
        _check(library, library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return total.value, free.value


def pci_address(index: int) -> str:
    """Where a GPU is on the PCI bus, as sysfs names it (0000:18:00.0); empty where the driver has none."""
    library, device, text = load(), ctypes.c_int(), ctypes.create_string_buffer(32)
    _check(library, library.cuDeviceGet(ctypes.byref(device), index))
    return "" if library.cuDeviceGetPCIBusId(text, len(text), device) else text.value.decode("ascii").lower()


def dotted(version: tuple[int, int]) -> str:
    """`8.9` for (8, 9)."""
    return f"{version[0]}.{version[1]}"


def _gpu(library: Any, index: int) -> Gpu:
    device, total = ctypes.c_int(), ctypes.c_size_t()
    name, raw = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    _check(library, library.cuDeviceGet(ctypes.byref(device), index))
    _check(library, library.cuDeviceGetName(name, len(name), device))
    _check(library, library.cuDeviceGetUuid_v2(ctypes.byref(raw), device))
    _check(library, library.cuDeviceTotalMem_v2(ctypes.byref(total), device))
    text = name.value.decode("utf-8", "replace")
    prefix = "MIG" if " MIG " in text else "GPU"
    digits = bytes(raw).hex()
    uuid = "-".join((prefix, digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    capability = (_attribute(library, MAJOR, device), _attribute(library, MINOR, device))
    return Gpu(index, text, uuid, capability, _attribute(library, NUM_SMS, device), total.value)


def _attribute(library: Any, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _check(library, library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
    return value.value


def _check(library: Any, code: int) -> None:
    if code:
        raise OSError(f"the NVIDIA driver refuses: {_error_name(library, code)}")


def _error_name(library: Any, code: int) -> str:
    text = ctypes.c_char_p()
    if library.cuGetErrorName(code, ctypes.byref(text)) or not text.value:
        return f"error {code}"
    return text.value.decode()
