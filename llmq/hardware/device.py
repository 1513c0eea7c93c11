"""The device of a run: which one, what it is, how much memory it has, and how fast it can multiply.

This is the one place where a backend is chosen: the CPU, the first GPU that CUDA sees, or for a dry run a GPU that is
not here at all.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmq.disk import shown, size_bytes
from llmq.errors import MemoryLimitError, UsageError
from llmq.hardware import cards as gpus
from llmq.hardware import cores, cuda_driver, nvml
from llmq.hardware.cuda_driver import OLDEST_CAPABILITY, Problem, dotted
from llmq.hardware.host_memory import host_memory_bytes, may_grow
from llmq.plugins import split, table
from llmq.tensor import DTYPES

if TYPE_CHECKING:
    from llmq.options.run import SystemOptions

# module: distribution, where the names differ
LIBRARIES = {
    **dict.fromkeys(("numpy", "ml_dtypes", "tokenizers", "safetensors", "huggingface_hub", "pyarrow", "pydantic"), ""),
    "yaml": "PyYAML",
}
PEAK_SECONDS = 0.15  # of measuring
PEAK_SIZES = (256, 512, 1024)  # of square matrices; one that would take longer than all the time is left out
CUDA_PEAK_SIZE = 4096
PEAK_DRAWN = 1_048_573  # random numbers that fill its matrices: a prime, so that no row repeats another
OLDEST_FP8 = (8, 9)  # compute capability
OLDEST_PACKING = (9, 0)  # for which cuDNN has attention on documents of unequal lengths (9.19)
HOPPER = (9, 0)  # the only one for which cuBLASLt has scales per row and per 128 numbers (as of 13.1)


@dataclass(frozen=True)
class Device:
    """Where a run computes: `kind` is cpu or cuda. A CUDA device is a GPU that is here, or a card to plan for."""

    kind: str = "cpu"
    gpu: cuda_driver.Gpu | None = None
    planned: gpus.Card | None = None
    limit_bytes: int | None = None  # of memory that it is taken to have
    note: str | None = None  # why `auto` is not the GPU that is here
    num_sharing: int = 1  # processes of the run on this machine, which share its host memory
    plugin: str = ""  # the backend of one, which computes in the host's memory

    @property
    def backend(self) -> str:
        """What `open_backend` takes."""
        return "planned" if self.planned else self.plugin or self.kind

    @property
    def card(self) -> gpus.Card | None:
        """The card's entry in the table of cards; None for the CPU and for cards that are not in it."""
        return self.planned or (gpus.find(self.gpu.name) if self.gpu else None)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of a CUDA device: (9, 0)."""
        found = self.planned or self.gpu
        assert found is not None
        return found.capability


CPU = Device()


def cuda_backend_problem() -> Problem | None:
    """Why the CUDA backend cannot run here: driver, GPU, libraries; None if it can."""
    driver = cuda_driver.read()
    found = cuda_driver.problem(driver)
    return found if found or driver is None else cuda_driver.library_problem(driver.cuda)


def pick_device(options: SystemOptions) -> Device:
    """The device to compute on, or with `--gpu` to plan for; with `--memory-limit` it is taken to have no more memory.

    UsageError if the requested one cannot be used, and for a limit below what CUDA's context takes.
    """
    if options.gpu is None:
        device = pick(options.device)
    elif (card := gpus.named(options.gpu)) is not None:
        device = Device("cuda", planned=card, num_sharing=max(options.gpus, 1))
    else:
        known = ", ".join(gpus.nearest(options.gpu))
        raise UsageError(f"--gpu {options.gpu} is not a known card: give a size such as 24GiB, or one of {known}")
    limit = size_bytes(options.memory_limit) if options.memory_limit else None
    if device.kind == "cuda" and limit is not None and limit <= gpus.CONTEXT_BYTES:
        raise UsageError(
            f"--memory-limit {options.memory_limit} leaves nothing beside CUDA's context, which is taken to need "
            f"{shown(gpus.CONTEXT_BYTES)}: use more"
        )
    return replace(device, limit_bytes=limit)


def pick(device: str) -> Device:
    """The device of `auto`, `cpu` or `cuda`, or of a plug-in's backend. UsageError for a GPU that cannot be used."""
    if device == "cpu":
        return CPU
    if device not in ("auto", "cuda"):
        if not table("backend").has(split(device)[0]):
            raise UsageError(f"device {device} is not one of auto, cuda, cpu, and no plug-in has this name")
        return Device(plugin=device)
    problem = cuda_backend_problem()
    if problem is None:
        driver = cuda_driver.read()
        assert driver is not None
        return Device("cuda", gpu=driver.gpus[0])
    if device == "cuda":
        raise UsageError(f"--device cuda: {problem}; or use --device cpu")
    if cuda_driver.load() is None:
        return CPU
    there = "a GPU is there, but " if problem.has_gpu else ""
    return Device(note=f"{there}{problem.what}: training on the CPU (for the GPU: {problem.fix})")


def gpu_addresses(gpus: int) -> list[str]:
    """PCI addresses of the first `gpus` GPUs that CUDA sees, or of all with 0. UsageError if they are not there.

    An address is empty where the driver has none.
    """
    problem, driver = cuda_backend_problem(), cuda_driver.read()
    there = len(driver.gpus) if driver and problem is None else 0
    if gpus > there or not there:
        raise UsageError(
            f"--gpus {gpus}: {problem or f'CUDA sees {there} here'}; llmq-launch --procs N starts ranks on the CPU"
        )
    return [cuda_driver.pci_address(index) for index in range(gpus or there)]


def planned_gpus(options: SystemOptions) -> int:
    """How many GPUs a dry run is for. UsageError where they cannot be counted."""
    if options.gpus:
        return options.gpus
    if options.gpu is not None:
        raise UsageError(f"--gpus 0 counts the GPUs of this machine, and --gpu {options.gpu} is another: give a number")
    return len(gpu_addresses(0))


def use(device: Device, index_of: Callable[[int], int]) -> Device:
    """The GPU of one rank of many, which becomes the current one of this thread; the CPU and planned cards as they are.

    `index_of` chooses it by how many GPUs CUDA sees. UsageError if that one is too old.
    """
    if device.gpu is None:
        return device
    driver = cuda_driver.read()
    assert driver is not None
    gpu = driver.gpus[index_of(len(driver.gpus))]
    if gpu.capability < OLDEST_CAPABILITY:
        raise UsageError(
            f"GPU {gpu.index}, {gpu.name}, has compute capability {dotted(gpu.capability)}, below "
            f"{dotted(OLDEST_CAPABILITY)}: leave it out with CUDA_VISIBLE_DEVICES"
        )
    import cupy

    cupy.cuda.Device(gpu.index).use()
    return replace(device, gpu=gpu)


def refuse_dtypes(device: Device, *dtypes: str, scaling: str = "delayed", option: str = "--matmul-dtype") -> None:
    """UsageError if the matmuls of a run are of a dtype, or read fp8 by scales, that the GPU does not have.

    `option` is the one that sets the dtype.
    """
    if "e4m3" not in dtypes or device.kind == "cpu":
        return
    if not has_fp8(device):
        raise UsageError(
            f"{option} e4m3 needs a GPU of compute capability {dotted(OLDEST_FP8)} or later, and "
            f"{_gpu_name(device)} has {dotted(device.capability)}: use {option} bf16"
        )
    if scaling in ("rowwise", "blockwise") and device.capability != HOPPER:
        raise UsageError(
            f"--fp8-scaling {scaling} needs a GPU of compute capability {dotted(HOPPER)}, as cuBLASLt has "
            f"such scales for no other, and {_gpu_name(device)} has {dotted(device.capability)}: use "
            "--fp8-scaling delayed or current"
        )


def packing_problem(device: Device, dtype: str) -> str | None:
    """Why attention of activations in `dtype` does not take packed rows on the device; None if it does."""
    if device.kind == "cpu" or dtype != "bf16" or device.capability >= OLDEST_PACKING:
        return None
    return (
        f"packed rows in bf16 need a GPU of compute capability {dotted(OLDEST_PACKING)} or later, and "
        f"{_gpu_name(device)} has {dotted(device.capability)}"
    )


def has_fp8(device: Device) -> bool:
    """Whether fp8 matmuls run here; the CPU's backend has every dtype."""
    return device.kind == "cpu" or device.capability >= OLDEST_FP8


def backend_settings(options: SystemOptions, device: Device) -> dict[str, Any]:
    """Keywords of `open_backend`: how programs run, and the capability of a card that is planned for."""
    found = {"use_graphs": options.use_cuda_graphs, "deterministic": options.deterministic}
    return found | ({"capability": device.planned.capability} if device.planned else {})


def system_facts(device: Device = CPU) -> dict[str, Any]:
    """What a run runs on, for the log: device, memory, system, and the libraries that are loaded."""
    total, free = memory_bytes(device)
    facts = {
        "device": f"cpu: {cpu_name()}" if device.kind == "cpu" else f"cuda: {_gpu_name(device)}",
        **({"gpu": device.note} if device.note else {}),
        "cores": cores.num_cores(),
        "memory": f"{shown(total - free)} / {shown(total)}",
        **(_cuda_facts(device) if device.kind == "cuda" else {}),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }
    for module, distribution in LIBRARIES.items():
        if module in sys.modules:
            facts[distribution or module] = cuda_driver.installed(distribution or module) or "unknown"
    facts["blas"] = cores.blas_in_words()
    return facts


def _gpu_name(device: Device) -> str:
    if device.planned:
        return f"{device.planned.name} (planned for, not used)"
    assert device.gpu is not None
    return device.gpu.name


def _cuda_facts(device: Device) -> dict[str, Any]:
    """What the log has of a GPU beside its name and memory: only what is known."""
    found = device.planned or device.gpu
    assert found is not None
    capability = dotted(found.capability)
    if not found.num_sms:
        return {"compute capability": f"{capability}, assumed of a GPU that is given by its size"}
    facts: dict[str, Any] = {"compute capability": capability, "SMs": found.num_sms}
    rate = f"{peaks(device)['bf16'] / gpus.TERA:.4g} TFLOP/s bf16"
    source = device.card.source if device.card else "measured, since this card is not in llmq's table"
    facts["peak"] = f"{rate}, {source}"
    if device.gpu is None:
        return facts
    driver, reading = cuda_driver.read(), nvml.read(device.gpu.uuid) or nvml.Reading()
    assert driver is not None
    version = f"{reading.driver or driver.version or 'unknown'} (CUDA {dotted(driver.cuda)})"
    facts |= {"uuid": device.gpu.uuid, "driver": version}
    known = {"power limit": ("{:.0f} W", reading.max_watts), "largest clock": ("{} MHz", reading.max_sm_mhz)}
    facts |= {name: text.format(value) for name, (text, value) in known.items() if value is not None}
    if reading.pcie_generation is not None and reading.pcie_lanes is not None:
        facts["pcie"] = f"generation {reading.pcie_generation}, {reading.pcie_lanes} lanes"
    return facts | cuda_driver.versions()


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


def memory_bytes(device: Device = CPU) -> tuple[int, int]:
    """(total, free) bytes of the device's memory, for the CPU that of the host, as if there were no more than its
    limit.

    What is in use counts against the limit of a GPU, whose context is made here, so that what it takes is not free.
    MemoryLimitError if the GPU has no room for one, or belongs to another process alone.
    """
    if device.kind == "cpu":
        total, free = host_memory_bytes()
    elif device.planned:
        total, free = device.planned.total_bytes, device.planned.free_bytes
    else:
        assert device.gpu is not None
        try:
            total, free = cuda_driver.memory_bytes(device.gpu)
        except OSError as error:
            raise MemoryLimitError(
                f"{device.gpu.name} cannot be used now: {error}: end what runs on it (nvidia-smi lists it), or choose "
                "another with CUDA_VISIBLE_DEVICES"
            ) from error
    if device.limit_bytes is None:
        return total, free
    used = total - free if device.kind == "cuda" else 0
    return min(total, device.limit_bytes), max(min(free, device.limit_bytes - used), 0)


def host_bytes(options: SystemOptions, device: Device) -> int | None:
    """Bytes of host memory that a process may keep: what is free, or the limit, which is all that is known where a card
    is planned for; of several processes of a run on one machine, an equal part of it.

    Of a machine whose memory grows as it is used, the limit is what it may grow to.
    """
    limit = size_bytes(options.host_memory_limit) if options.host_memory_limit else None
    free = None if device.planned or (limit and may_grow()) else host_memory_bytes()[1]
    return min((size // device.num_sharing for size in (limit, free) if size is not None), default=None)


def peaks(device: Device = CPU) -> dict[str, float]:
    """Peak FLOP/s by dtype: of a GPU its papers' dense rates, else the rate at which it multiplies large matrices.

    The CPU's backend computes in f32, or f64, whatever the storage. No `e4m3` where a GPU has none.
    """
    if device.kind == "cpu":
        rate = measured_peak("fp32")
        return {**dict.fromkeys(("fp32", "bf16", "e4m3"), rate), "fp64": rate / 2}
    if device.card:
        return device.card.peaks
    rates = {"bf16": measured_cuda_peak("fp16"), "fp32": measured_cuda_peak("fp32")}
    # Every tensor core with fp8 has it at twice its bf16 rate.
    return rates | ({"e4m3": 2 * rates["bf16"]} if device.capability >= OLDEST_FP8 else {})


@cache
def measured_cuda_peak(dtype: str) -> float:
    """FLOP/s of cuBLAS's matrix product on the current GPU, the best of ten, 4096 on a side; measured once per process.

    fp16 takes the place of bf16, which CuPy does not multiply: both sum in f32, at one rate on every tensor core.
    """
    import cupy

    size = CUDA_PEAK_SIZE
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    # a product of zeros draws less power and runs at a higher clock; drawing every number would take a quarter second
    drawn = np.random.default_rng(0).standard_normal(PEAK_DRAWN, np.float32)
    values = drawn.astype(DTYPES[dtype])
    a, best = cupy.asarray(np.resize(values, (size, size))), 0.0
    out = cupy.matmul(a, a)
    for _ in range(10):
        start.record()
        cupy.matmul(a, a, out=out)
        end.record()
        end.synchronize()
        best = max(best, 2e3 * size**3 / cupy.cuda.get_elapsed_time(start, end))
    del a, out
    cupy.get_default_memory_pool().free_all_blocks()
    return best


@cache
def measured_peak(dtype: str) -> float:
    """FLOP/s of NumPy's matrix product, the best of a fifth of a second; measured once per process.

    There is no data sheet to ask: clock, cores and vector width that a container really gets are only seen in use.
    """
    best = 0.0
    for size in PEAK_SIZES:
        if best and 2 * size**3 / best > PEAK_SECONDS:
            break
        a = np.ones((size, size), DTYPES[dtype])
        out = np.empty_like(a)
        np.matmul(a, a, out=out)
        deadline = time.perf_counter() + PEAK_SECONDS / len(PEAK_SIZES)
        while (start := time.perf_counter()) < deadline:
            np.matmul(a, a, out=out)
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best
