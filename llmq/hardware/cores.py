"""Which cores each rank of a machine runs on: those beside its GPU, or its share of the CPU.

Memory needs no setting of its own: Linux gives a process pages of the NUMA node on whose cores it first writes them.
"""

from __future__ import annotations

import os
from pathlib import Path


def cores_of_ranks(num: int, gpus: list[str] | None, root: Path = Path("/")) -> list[frozenset[int]]:
    """The cores of each of `num` ranks: an empty set leaves a rank where it is.

    `gpus` has the PCI address of each rank's GPU (0000:18:00.0), or is None for ranks on the CPU, which get equal
    shares of the cores that this process may use. `root` is where sys is mounted.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return [frozenset()] * num
    allowed = frozenset(os.sched_getaffinity(0))
    if gpus is not None:
        return [cores_beside(address, root) & allowed for address in gpus]
    order, each = sorted(allowed), max(1, len(allowed) // num)
    return [frozenset(order[(i * each) % len(order) :][:each]) for i in range(num)]


def cores_beside(address: str, root: Path = Path("/")) -> frozenset[int]:
    """The cores of the NUMA node that a PCI device hangs on; none where the system does not tell."""
    try:
        text = (root / "sys/bus/pci/devices" / address / "local_cpulist").read_text("ascii").strip()
    except OSError:
        return frozenset()
    return read_cores(text)


def read_cores(text: str) -> frozenset[int]:
    """The numbers of `0-3,8`."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))
