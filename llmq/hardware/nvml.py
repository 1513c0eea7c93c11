"""What NVML says of a GPU: driver, memory, clocks, power, temperature, why it is slowed down, PCIe, other processes.

Everything may be missing: the library itself, the Python package `nvidia-ml-py`, single readings under WSL2, in a
container, on a part of a GPU (MIG) or on one that shares the host's memory. What is missing is None, never zero.

A GPU is named by its UUID, since NVML counts the machine's GPUs, CUDA those of CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

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
TX, RX = 0, 1  # nvmlPcieUtilCounter_t: from the GPU, to the GPU


@dataclass(frozen=True)
class Reading:
    """A GPU now. None is what NVML does not say. `throttled` names what holds the clocks down: empty if nothing."""

    name: str | None = None
    driver: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
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
    """All readings of the GPU with this UUID (GPU-... or MIG-...); None without NVML, or if it knows no such GPU.

    `traffic` counts what passes over PCIe too, which takes the driver 20 ms in each direction.
    """
    found = _gpu(uuid)
    if found is None:
        return None
    nvml, gpu, say = found
    memory = say("nvmlDeviceGetMemoryInfo", gpu)
    reasons = say("nvmlDeviceGetCurrentClocksEventReasons", gpu)
    if reasons is None:  # its name before driver 535
        reasons = say("nvmlDeviceGetCurrentClocksThrottleReasons", gpu)
    rates = say("nvmlDeviceGetUtilizationRates", gpu)
    passed = {way: say("nvmlDeviceGetPcieThroughput", gpu, way) for way in (TX, RX) if traffic}
    return Reading(
        name=_as(_text, say("nvmlDeviceGetName", gpu)),
        driver=_as(_text, say("nvmlSystemGetDriverVersion")),
        total_bytes=_as(int, getattr(memory, "total", None)),
        free_bytes=_as(int, getattr(memory, "free", None)),
        used_bytes=_as(int, getattr(memory, "used", None)),
        sm_mhz=_as(int, say("nvmlDeviceGetClockInfo", gpu, nvml.NVML_CLOCK_SM)),
        memory_mhz=_as(int, say("nvmlDeviceGetClockInfo", gpu, nvml.NVML_CLOCK_MEM)),
        max_sm_mhz=_as(int, say("nvmlDeviceGetMaxClockInfo", gpu, nvml.NVML_CLOCK_SM)),
        watts=_as(_thousandth, say("nvmlDeviceGetPowerUsage", gpu)),
        max_watts=_as(_thousandth, say("nvmlDeviceGetEnforcedPowerLimit", gpu)),
        celsius=_as(int, say("nvmlDeviceGetTemperature", gpu, nvml.NVML_TEMPERATURE_GPU)),
        throttled=_as(_reasons, reasons),
        pcie_generation=_as(int, say("nvmlDeviceGetCurrPcieLinkGeneration", gpu)),
        pcie_lanes=_as(int, say("nvmlDeviceGetCurrPcieLinkWidth", gpu)),
        gpu_percent=_as(int, getattr(rates, "gpu", None)),
        memory_percent=_as(int, getattr(rates, "memory", None)),
        pcie_rx_kb_s=_as(int, passed.get(RX)),
        pcie_tx_kb_s=_as(int, passed.get(TX)),
    )


def num_processes(uuid: str) -> int | None:
    """How many processes have a CUDA context on the GPU, this one with it; None where NVML does not say.

    Only their number is good everywhere: a container sees the process ids of its host.
    """
    found = _gpu(uuid)
    if found is None:
        return None
    _, gpu, say = found
    processes = say("nvmlDeviceGetComputeRunningProcesses", gpu)
    return None if processes is None else len(processes)


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


def _gpu(uuid: str) -> tuple[Any, Any, Callable[..., Any]] | None:
    """NVML, its handle of a GPU, and a function that asks it something; None if there is no such GPU."""
    nvml = _started()
    if nvml is None:
        return None
    try:
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None

    def say(function: str, *arguments: Any) -> Any:
        """What an NVML function answers; None if this driver, GPU or version of the package does not have it."""
        try:
            return getattr(nvml, function)(*arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    return nvml, gpu, say


@cache
def _started() -> Any:
    """The package `pynvml`, started once per process; None if it or the library is not there."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    atexit.register(pynvml.nvmlShutdown)
    return pynvml


def _as(kind: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else kind(value)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value  # bytes before version 11.5


def _thousandth(value: int) -> float:
    return value / 1000


def _reasons(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in THROTTLE.items() if bits & bit)
