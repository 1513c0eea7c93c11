"""Readings of a GPU by NVML: driver, memory, clocks, power, temperature, why it is slowed down, PCIe, other processes.

Everything may be missing: the library itself, the Python package `nvidia-ml-py`, single readings under WSL2, in a
container, on a part of a GPU (MIG) or on one that shares the host's memory. What is missing is None, never zero.

A GPU is named by its UUID, since NVML counts the machine's GPUs, CUDA those of CUDA_VISIBLE_DEVICES.
"""

import atexit
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

THROTTLE = {  # bits of nvmlDeviceGetCurrentClocksEventReasons; idle (1) and application clocks (2) slow nothing down
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "other GPUs of its group",
    0x20: "temperature",
    0x40: "hardware temperature",
    0x80: "power brake",
    0x100: "display clocks",
}

NVLINKS = 18  # that a GPU has at most


@dataclass(frozen=True)
class Reading:
    """A GPU now. None is not known. `throttled` names what holds the clocks down: empty if nothing."""

    driver: str | None = None
    used_bytes: int | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    max_sm_mhz: int | None = None
    watts: float | None = None
    max_watts: float | None = None
    celsius: int | None = None
    throttled: tuple[str, ...] | None = None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    gpu_percent: int | None = None  # of the time in which a kernel ran, over the driver's last period
    memory_percent: int | None = None  # of the time in which its memory was read or written
    pcie_rx_kb_s: int | None = None  # to the GPU; only with `traffic`
    pcie_tx_kb_s: int | None = None  # from the GPU; only with `traffic`


def read(uuid: str, *, traffic: bool = False) -> Reading | None:
    """All readings of the GPU with this UUID (GPU-... or MIG-...); None without NVML, or if there is no such GPU.

    `traffic` counts what passes over PCIe too, which takes the driver 20 ms in each direction.
    """
    found = _gpu(uuid)
    if found is None:
        return None
    nvml, of = found
    memory, rates, watts, limit = of("MemoryInfo"), of("UtilizationRates"), of("PowerUsage"), of("EnforcedPowerLimit")
    reasons = of("CurrentClocksEventReasons")
    if reasons is None:  # its name before driver 535
        reasons = of("CurrentClocksThrottleReasons")
    return Reading(
        driver=_answer(nvml, "nvmlSystemGetDriverVersion"),
        used_bytes=getattr(memory, "used", None),
        sm_mhz=of("ClockInfo", nvml.NVML_CLOCK_SM),
        memory_mhz=of("ClockInfo", nvml.NVML_CLOCK_MEM),
        max_sm_mhz=of("MaxClockInfo", nvml.NVML_CLOCK_SM),
        watts=None if watts is None else watts / 1000,
        max_watts=None if limit is None else limit / 1000,
        celsius=of("Temperature", nvml.NVML_TEMPERATURE_GPU),
        throttled=None if reasons is None else tuple(name for bit, name in THROTTLE.items() if reasons & bit),
        pcie_generation=of("CurrPcieLinkGeneration"),
        pcie_lanes=of("CurrPcieLinkWidth"),
        gpu_percent=getattr(rates, "gpu", None),
        memory_percent=getattr(rates, "memory", None),
        pcie_rx_kb_s=of("PcieThroughput", nvml.NVML_PCIE_UTIL_RX_BYTES) if traffic else None,
        pcie_tx_kb_s=of("PcieThroughput", nvml.NVML_PCIE_UTIL_TX_BYTES) if traffic else None,
    )


@dataclass(frozen=True)
class Health:
    """How a GPU is set up and linked, and its errors since the driver started. None is not known.

    `compute_mode` is the driver's number; `nvlinks` are (active, all) links.
    """

    total_bytes: int | None = None
    num_processes: int | None = None  # with a CUDA context, this one too if it has one
    compute_mode: int | None = None
    is_persistent: bool | None = None
    is_mig: bool | None = None
    has_ecc: bool | None = None
    uncorrected_errors: int | None = None
    is_remap_pending: bool | None = None  # of rows of its memory, which the next reset brings
    has_remap_failed: bool | None = None
    max_pcie_generation: int | None = None
    max_pcie_lanes: int | None = None
    nvlinks: tuple[int, int] = (0, 0)


def health(uuid: str) -> Health | None:
    """That of the GPU with this UUID; None without NVML, or if there is no such GPU."""
    found = _gpu(uuid)
    if found is None:
        return None
    nvml, of = found
    processes, persistent, remapped = of("ComputeRunningProcesses"), of("PersistenceMode"), of("RemappedRows")
    mig, ecc = of("MigMode"), of("EccMode")  # each now, and from the next reset on
    uncorrected, volatile = (
        getattr(nvml, f"NVML_{name}", 0) for name in ("MEMORY_ERROR_TYPE_UNCORRECTED", "VOLATILE_ECC")
    )
    links = [state for link in range(NVLINKS) if (state := of("NvLinkState", link)) is not None]
    return Health(
        total_bytes=getattr(of("MemoryInfo"), "total", None),
        num_processes=None if processes is None else len(processes),
        compute_mode=of("ComputeMode"),
        is_persistent=None if persistent is None else bool(persistent),
        is_mig=None if mig is None else bool(mig[0]),
        has_ecc=None if ecc is None else bool(ecc[0]),
        uncorrected_errors=of("TotalEccErrors", uncorrected, volatile),
        is_remap_pending=None if remapped is None else bool(remapped[2]),
        has_remap_failed=None if remapped is None else bool(remapped[3]),
        max_pcie_generation=of("MaxPcieLinkGeneration"),
        max_pcie_lanes=of("MaxPcieLinkWidth"),
        nvlinks=(sum(map(bool, links)), len(links)),
    )


def num_others(uuid: str) -> int | None:
    """How many processes beside this one, which has one itself, have a CUDA context on the GPU; None where that is not
    known.

    Only their number is good everywhere: a container sees the process ids of its host.
    """
    found = _gpu(uuid)
    processes = found[1]("ComputeRunningProcesses") if found else None
    return None if processes is None else max(len(processes) - 1, 0)


class Background:
    """Reads a GPU in a thread of its own, which touches no stream: once, or with `every_s` until it is stopped."""

    def __init__(self, uuid: str, *, every_s: float | None = None, traffic: bool = False) -> None:
        self._uuid, self._every_s, self._traffic = uuid, every_s, traffic
        self._readings: list[Reading] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="llmq-nvml", daemon=True)
        self._thread.start()

    def stop(self) -> tuple[Reading, ...]:
        """Waits for the reading that is under way; all of them, in order: at least one where NVML answers."""
        self._stop.set()
        self._thread.join()
        return tuple(self._readings)

    def _read(self) -> None:
        while True:
            reading = read(self._uuid, traffic=self._traffic)
            if reading is not None:
                self._readings.append(reading)
            if reading is None or self._every_s is None or self._stop.wait(self._every_s):
                return


def _gpu(uuid: str) -> tuple[Any, Callable[..., Any]] | None:
    """NVML, and what answers its nvmlDeviceGet... functions for a GPU; None if there is no such GPU."""
    nvml = _started()
    gpu = nvml and _answer(nvml, "nvmlDeviceGetHandleByUUID", uuid)
    return None if gpu is None else (nvml, lambda what, *more: _answer(nvml, f"nvmlDeviceGet{what}", gpu, *more))


def _answer(nvml: Any, function: str, *arguments: Any) -> Any:
    """What an NVML function answers; None if this driver, GPU or version of the package does not have it."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


@cache
def _started() -> Any:
    """The package `pynvml`, started once per process; None if it or the library is not there."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return None
    except pynvml.NVMLError:
        return None
    atexit.register(pynvml.nvmlShutdown)
    return pynvml
