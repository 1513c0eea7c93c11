"""What GPUs reach of what their cards should: products, copies, an all-reduce; measured by processes of their own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq.doctor.finding import FAULT, OK, WARNING, Finding
from llmq.engine.predict import Rates, sustained
from llmq.hardware import cards
from llmq.hardware.cards import GIGA, TERA
from llmq.hardware.cuda_driver import Gpu

LIMIT_S = 10.0  # of one process: the first one on a machine compiles a kernel
SLOW, BROKEN = 0.8, 0.4  # shares of what a card sustains (`engine/predict.py`) below which it is a warning, and a fault
SLOWED = "look at gpuN.clocks while a run trains (nvidia-smi -q -d PERFORMANCE): power limit, heat, other processes"
SLOT = "see gpuN.pcie: a slot with fewer lanes or an older generation, or memory of another NUMA node"
LINKS = "see gpuN.peers; NCCL_DEBUG=INFO llmq-train says which way NCCL goes"
CRASHED = "update the driver, and see whether dmesg has an Xid"


@dataclass(frozen=True)
class Measured:
    """What a process wrote, and what went wrong with it."""

    found: Mapping[str, Any]
    problem: str = ""


def measure(arguments: Sequence[Sequence[str]], limit_s: float = LIMIT_S) -> list[Measured]:
    """Runs `llmq.doctor.measure` with each of the arguments, all at once, in process groups that end with the limit."""
    deadline, processes = time.monotonic() + limit_s, []
    for given in arguments:
        command = [sys.executable, "-m", "llmq.doctor.measure", *given]
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        )
    return [_ended(process, deadline, limit_s) for process in processes]


def _ended(process: "subprocess.Popen[str]", deadline: float, limit_s: float) -> Measured:
    problem = ""
    try:
        out, errors = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        (out, errors), problem = process.communicate(), f"not over after {limit_s:.0f} s"
    if process.returncode and not problem:
        lines = [line for line in errors.splitlines() if line.strip()]
        problem = lines[-1].strip() if lines else f"ended with {process.returncode}"
    found: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return Measured(found, problem)


def gpus(there: Sequence[Gpu]) -> Iterator[Finding]:
    """Products and copies of each."""
    with tempfile.TemporaryDirectory(prefix="llmq-doctor-") as folder:
        lock = str(Path(folder) / "lock")
        for gpu, measured in zip(there, measure([("gpu", str(gpu.index), lock) for gpu in there]), strict=True):
            yield from of_gpu(gpu, measured)


def of_gpu(gpu: Gpu, measured: Measured) -> Iterator[Finding]:
    """What was measured of a GPU, against its card."""
    name, card = f"gpu{gpu.index}", cards.find(gpu.name)
    rates = sustained(card) if card else None
    found = measured.found
    during = found.get("gpu", {})
    state = f", at {during['sm_mhz']:.0f} MHz" if during.get("sm_mhz") else ""
    state += "".join(
        f", {reason} {100 * share:.0f}% of the time" for reason, share in (during.get("throttled") or {}).items()
    )
    for dtype, rate in found.get("flops", {}).items():
        least = rates.flops.get(dtype) if rates else None
        yield judged(f"{name}.matmul.{dtype}", rate, least, TERA, "TFLOP/s", SLOWED, state)
    if "copy" in found:
        yield judged(
            f"{name}.copy", found["copy"], rates.memory if rates else None, GIGA, "GB/s read and written", SLOWED
        )
    for way in ("to_device", "to_host"):
        if way in found:
            yield judged(f"{name}.{way}", found[way], rates.link if rates else None, GIGA, "GB/s", SLOT)
    if found.get("locked") is False:
        fix = "raise ulimit -l, or give the container the right to lock memory (--ulimit memlock=-1)"
        yield Finding(f"{name}.locked", "the system refuses to lock host memory", WARNING, "offload is slower", fix)
    if measured.problem:
        yield Finding(f"{name}.speed", measured.problem, FAULT, "runs may end or hang the same way", CRASHED)


def between(there: Sequence[Gpu]) -> Iterator[Finding]:
    """An all-reduce between all GPUs."""
    (measured,) = measure([("all-reduce", str(len(there)))])
    card = cards.find(there[0].name)
    yield from of_all_reduce(len(there), sustained(card) if card else None, measured)


def of_all_reduce(count: int, rates: Rates | None, measured: Measured) -> Iterator[Finding]:
    """What was measured between `count` GPUs."""
    found, of = measured.found, f"of bus bandwidth between {count} GPUs"
    if found.get("right") is False:
        fix = "switch off ACS and the IOMMU in the BIOS, or set NCCL_P2P_DISABLE=1"
        yield Finding("all_reduce", "NCCL's sums are wrong", FAULT, "the loss does not fall, or is not finite", fix)
    elif "bus" in found:
        yield judged("all_reduce", found["bus"], rates.peers if rates else None, GIGA, f"GB/s {of}", LINKS)
    if measured.problem:
        fix = "NCCL_DEBUG=INFO says why; often /dev/shm is too small (memory.shared), or NCCL_P2P_DISABLE=1 helps"
        yield Finding("all_reduce", measured.problem, FAULT, "runs with --gpus end or hang at their start", fix)


def judged(name: str, rate: float, least: float | None, unit: float, words: str, fix: str, state: str = "") -> Finding:
    """A rate against what the card sustains, None if that is not known."""
    value = f"{rate / unit:,.0f} {words}"
    numbers = {"per_s": rate}
    if least is None:
        return Finding(name, f"{value}{state}; what it should reach is not known", OK, numbers=numbers)
    share = rate / least
    value, numbers = (
        f"{value}, {100 * share:.0f}% of the {least / unit:,.0f} that it should reach{state}",
        {**numbers, "expected_per_s": least},
    )
    if share >= SLOW:
        return Finding(name, value, numbers=numbers)
    status = FAULT if share < BROKEN else WARNING
    return Finding(
        name, value, status, "what depends on it is slower", fix.replace("gpuN", name.split(".")[0]), numbers
    )
