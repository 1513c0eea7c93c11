"""The machine around the GPUs: cores, memory, what may be locked and shared of it, disks, and the Hub."""

import os
import resource
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmq.bench.ladder import measure_ceilings
from llmq.disk import GIB, MIB, cache_folder, existing_folder, free_bytes, new_file, shown, takes_files, write_all
from llmq.doctor.finding import FAULT, OK, WARNING, Finding
from llmq.hardware import cores
from llmq.hardware.cards import GIGA, TERA
from llmq.hardware.device import cpu_name
from llmq.hardware.host_memory import host_memory_bytes

LEAST_SHARED = GIB  # NCCL takes a few MiB for each pair of ranks; a container's default is 64 MiB
LEAST_FREE = 10 * GIB  # of a disk: a checkpoint of 0.5B parameters with fp32 moments is 6 GiB
WRITTEN = 64 * MIB  # to measure a disk, or what it takes in a second
SLOW_DISK = 50e6  # bytes/s
HUB_S = 3.0


def cpu() -> Iterator[Finding]:
    """Cores and threads of BLAS."""
    count = cores.num_cores()
    quota = f", of a quota of {found:g}" if (found := cores.cpu_quota()) else ""
    yield Finding("cpu", f"{cpu_name()}, {count} cores{quota}, {cores.blas_in_words()}", numbers={"cores": count})


def cpu_speed() -> Iterator[Finding]:
    """NumPy's matrix product and copy, which nothing says what they should reach."""
    found = measure_ceilings("cpu", ["fp32"])
    flops, copied = found.flops["fp32"], found.bytes_per_s
    value = f"{flops / GIGA:,.0f} GFLOP/s in fp32, copies {copied / GIGA:,.1f} GB/s read and written"
    yield Finding("cpu.speed", value, numbers={"tflops": flops / TERA, "gb_per_s": copied / GIGA})


def memory() -> Iterator[Finding]:
    """RAM, with the limits of containers."""
    total, free = host_memory_bytes()
    numbers = {"total_bytes": total, "free_bytes": free}
    value = f"{shown(free)} free of {shown(total)}"
    if free < total / 10:
        fix = "end what takes it (ps --sort -rss), or give the container more"
        yield Finding("memory", value, WARNING, "offload is refused, or the kernel ends the run", fix, numbers)
    else:
        yield Finding("memory", value, numbers=numbers)


def locked_memory(*, limit: int | None = None, has_infiniband: bool | None = None) -> Iterator[Finding]:
    """ulimit -l. CUDA's driver locks pages beyond it (gpuN.to_host shows whether it may); InfiniBand's does not."""
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if has_infiniband is None:
        has_infiniband = Path("/sys/class/infiniband").is_dir()
    if limit == resource.RLIM_INFINITY:
        yield Finding("memory.locked", "no limit (ulimit -l)")
        return
    value = f"{shown(limit)} (ulimit -l)"
    if has_infiniband:
        fix = "set memlock to unlimited in /etc/security/limits.conf, or --ulimit memlock=-1 of a container"
        yield Finding("memory.locked", value, WARNING, "NCCL fails over InfiniBand", fix)
    else:
        yield Finding("memory.locked", value)


def shared_memory(num_gpus: int, folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """What ranks on one machine share where GPUs do not reach each other."""
    free = free_bytes(folder)
    if num_gpus > 1 and free < LEAST_SHARED:
        fix = "start the container with --shm-size=8g or --ipc=host"
        yield Finding("memory.shared", f"{shown(free)} free in {folder}", WARNING, "NCCL may fail to start", fix)
    else:
        yield Finding("memory.shared", f"{shown(free)} free in {folder}", numbers={"free_bytes": free})


def disks(*, speed: bool) -> Iterator[Finding]:
    """The folders that llmq writes to unless it is given others."""
    from huggingface_hub import constants

    folders = {"cache": cache_folder(""), "runs": Path("runs").absolute(), "hub": Path(constants.HF_HUB_CACHE)}
    measured: dict[int, float] = {}
    for name, folder in folders.items():
        yield disk(name, folder, measured if speed else None)


def disk(name: str, folder: Path, measured: dict[int, float] | None) -> Finding:
    """One folder, which need not exist; `measured` has the bytes/s of disks so far, None if none is to be measured."""
    name, there = f"disk.{name}", existing_folder(folder)
    if not takes_files(there):
        fix = "give yourself the right to write there, or choose another (LLMQ_CACHE_DIR, HF_HOME, --out-dir)"
        return Finding(name, f"{there} cannot be written to", FAULT, "runs end when they write", fix)
    free = free_bytes(there)
    value, numbers = f"{shown(free)} free in {folder}", {"free_bytes": float(free)}
    if free < LEAST_FREE:
        fix = "free space, or choose another (LLMQ_CACHE_DIR, HF_HOME, --out-dir)"
        return Finding(name, value, WARNING, "a model or a checkpoint may not fit", fix, numbers)
    if measured is None:
        return Finding(name, value, OK, numbers=numbers)
    number = os.stat(there).st_dev
    rate = measured[number] = measured.get(number) or write_rate(there)
    value, numbers = f"{value}, writes {rate / 1e6:,.0f} MB/s", {**numbers, "mb_per_s": rate / 1e6}
    if rate < SLOW_DISK:
        fix = "choose a local disk, or save less often (--ckpt-interval)"
        return Finding(name, value, WARNING, "training waits for checkpoints", fix, numbers)
    return Finding(name, value, numbers=numbers)


def write_rate(folder: Path) -> float:
    """Bytes/s of a new file until it is durable."""
    block, written, began = os.urandom(4 * MIB), 0, time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".llmq-doctor-") as own, new_file(Path(own) / "file") as file:
        while written < WRITTEN and time.perf_counter() - began < 1:
            write_all(file, block)
            written += len(block)
        os.fsync(file)
        return written / (time.perf_counter() - began)


def hub(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The Hub: whether it may be asked, whether there is a token, which is not shown, and whether it answers."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", "HF_HUB_OFFLINE is set: only models and data that are here or in the cache can be used")
        return
    if get_token():
        yield Finding("hub.token", "there is one")
    else:
        yield Finding("hub.token", "none, which gated and private models need (hf auth login)")
    proxy = next((f", by {name}" for name in ("HTTPS_PROXY", "https_proxy") if environ.get(name)), "")
    began = time.perf_counter()
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=HUB_S).close()
    except urllib.error.HTTPError:
        pass  # an answer
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        fix = "set HTTPS_PROXY or HF_ENDPOINT, or HF_HUB_OFFLINE=1 and use folders"
        value = f"{constants.ENDPOINT} does not answer{proxy} ({reason})"
        yield Finding("hub", value, WARNING, "models and data of the Hub that are not cached cannot be used", fix)
        return
    yield Finding("hub", f"{constants.ENDPOINT} answers{proxy} in {1e3 * (time.perf_counter() - began):.0f} ms")
