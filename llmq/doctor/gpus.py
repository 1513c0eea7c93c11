"""One GPU by its readings of NVML, without a context on it, and the links between GPUs."""

from collections.abc import Callable, Iterator

from llmq.disk import GIB, shown
from llmq.doctor.finding import FAULT, OK, WARNING, Finding
from llmq.hardware import cards, nvml
from llmq.hardware.cuda_driver import OLDEST_CAPABILITY, Gpu, dotted
from llmq.hardware.nvml import Health, Reading

USED = 2 * GIB  # of a GPU where nothing runs but a desktop
EXCLUSIVE_THREAD, PROHIBITED, EXCLUSIVE = 1, 2, 3  # nvmlComputeMode_t
BROKEN = {
    "hardware slowdown",
    "hardware temperature",
    "power brake",
}  # reasons to slow down that cooling or power cause
RESET = "reset it (nvidia-smi -r) or restart the machine"
BRIEF = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER says more"


def examine(gpu: Gpu) -> Iterator[Finding]:
    """All of a GPU but its speed and its links."""
    reading, health = nvml.read(gpu.uuid), nvml.health(gpu.uuid)
    yield kind(gpu)
    if reading is None or health is None:
        value, fix = "NVML does not answer", "pip install nvidia-ml-py; see whether nvidia-smi works"
        yield Finding(f"gpu{gpu.index}.nvml", value, WARNING, "memory, clocks and errors are not known", fix)
        return
    for check in (memory, clocks, ecc, remapped_rows, persistence, compute_mode, mig):
        if found := check(f"gpu{gpu.index}", reading, health):
            yield found


def kind(gpu: Gpu) -> Finding:
    """What it is, and whether llmq can use it."""
    about = f"{gpu.name}, compute capability {dotted(gpu.capability)}, {gpu.num_sms} SMs"
    if gpu.capability < OLDEST_CAPABILITY:
        fix = f"leave it out with CUDA_VISIBLE_DEVICES ({dotted(OLDEST_CAPABILITY)} is the least)"
        return Finding(f"gpu{gpu.index}", about, FAULT, "kernels do not run on it", fix)
    known = "" if cards.find(gpu.name) else ", not in llmq's table of cards: its peaks are measured"
    return Finding(f"gpu{gpu.index}", about + known)


def memory(gpu: str, reading: Reading, health: Health) -> Finding | None:
    """What is free, while nothing of ours runs."""
    if reading.used_bytes is None or health.total_bytes is None:
        return None
    free = health.total_bytes - reading.used_bytes
    value, numbers = (
        f"{shown(free)} free of {shown(health.total_bytes)}",
        {"free_bytes": free, "total_bytes": health.total_bytes},
    )
    if reading.used_bytes < USED:
        return Finding(f"{gpu}.memory", value, OK, numbers=numbers)
    value += f", {health.num_processes} processes on it" if health.num_processes else ""
    fix = "end what runs there (nvidia-smi lists it), or choose another with CUDA_VISIBLE_DEVICES"
    return Finding(f"{gpu}.memory", value, WARNING, "less fits, and both are slower", fix, numbers)


def clocks(gpu: str, reading: Reading, health: Health) -> Finding | None:
    """Clock, heat, and what holds the clock down."""
    if reading.sm_mhz is None:
        return None
    parts = [
        f"{reading.sm_mhz} of {reading.max_sm_mhz} MHz",
        f"{reading.celsius} C",
        f"{reading.watts} of {reading.max_watts} W",
    ]
    value = ", ".join(part for part in parts if "None" not in part)
    slowed = set(reading.throttled or ())
    if not slowed:
        return Finding(f"{gpu}.clocks", value)
    value += f", slowed down by {', '.join(sorted(slowed))}"
    if slowed & BROKEN:
        return Finding(
            f"{gpu}.clocks",
            value,
            FAULT,
            "steps take up to twice as long",
            f"check its cooling and power supply: {BRIEF}",
        )
    return Finding(
        f"{gpu}.clocks", value, WARNING, "steps take longer", f"let it cool down, or raise its power limit: {BRIEF}"
    )


def ecc(gpu: str, reading: Reading, health: Health) -> Finding | None:
    """Errors of its memory that were not corrected."""
    if health.has_ecc is None:
        return None
    if not health.has_ecc:
        return Finding(f"{gpu}.ecc", "off")
    count = health.uncorrected_errors or 0
    if not count:
        return Finding(f"{gpu}.ecc", "on, no error that was not corrected")
    fix = f"{RESET}; if it comes back, have the card replaced"
    return Finding(f"{gpu}.ecc", f"{count} errors that were not corrected", FAULT, "runs end with a CUDA error", fix)


def remapped_rows(gpu: str, reading: Reading, health: Health) -> Finding | None:
    """Rows of its memory that were replaced, or could not be."""
    if health.has_remap_failed:
        return Finding(
            f"{gpu}.rows",
            "a bad row of its memory has no spare",
            FAULT,
            "runs end with a CUDA error",
            "have the card replaced",
        )
    if health.is_remap_pending:
        return Finding(
            f"{gpu}.rows", "a bad row of its memory is to be replaced", WARNING, "runs may end with a CUDA error", RESET
        )
    return None


def persistence(gpu: str, reading: Reading, health: Health) -> Finding | None:
    """Whether the driver stays loaded between runs."""
    if health.is_persistent is None:
        return None
    if health.is_persistent:
        return Finding(f"{gpu}.persistence", "on")
    return Finding(
        f"{gpu}.persistence", "off", WARNING, "each start waits seconds for the driver", "nvidia-smi -pm 1, as root"
    )


def compute_mode(gpu: str, reading: Reading, health: Health) -> Finding | None:
    """How many processes may use it."""
    if health.compute_mode == PROHIBITED:
        return Finding(
            f"{gpu}.compute_mode", "no process may use it", FAULT, "runs end at their start", "nvidia-smi -c 0, as root"
        )
    if health.compute_mode in (EXCLUSIVE_THREAD, EXCLUSIVE):
        fix = "nvidia-smi -c 0, as root"
        return Finding(f"{gpu}.compute_mode", "for one process alone", WARNING, "a second one ends at its start", fix)
    return Finding(f"{gpu}.compute_mode", "shared") if health.compute_mode == 0 else None


def mig(gpu: str, reading: Reading, health: Health) -> Finding | None:
    """Whether it is split."""
    if not health.is_mig:
        return None
    fix = "nvidia-smi -mig 0, as root, for all of it"
    return Finding(
        f"{gpu}.mig", "split into parts (MIG)", WARNING, "a run gets one part, and no NCCL between parts", fix
    )


def links(gpu: Gpu, others: list[Gpu], can_reach: Callable[[int, int], bool]) -> Iterator[Finding]:
    """PCI Express, NVLink, and which other GPUs it reaches without the host. An idle link has a lower generation."""
    name, reading, health = f"gpu{gpu.index}", nvml.read(gpu.uuid) or Reading(), nvml.health(gpu.uuid) or Health()
    if reading.pcie_lanes is not None:
        generation, lanes, most = reading.pcie_generation, reading.pcie_lanes, health.max_pcie_lanes
        value = f"generation {generation} (at most {health.max_pcie_generation}), {lanes} lanes (at most {most})"
        if most and lanes < most:
            fix = "put it into a slot with all lanes, or seat it again"
            yield Finding(f"{name}.pcie", value, WARNING, "offload and copies to the host are slower", fix)
        else:
            yield Finding(f"{name}.pcie", value)
    if not others:
        return
    active, total = health.nvlinks
    card = cards.find(gpu.name)
    reached = [other.index for other in others if can_reach(gpu.index, other.index)]
    value = f"{active} of {total} NVLinks, reaches {', '.join(f'gpu{i}' for i in reached) or 'no other GPU'} directly"
    if active < total or (card is not None and card.nvlink and not active):
        fix = "systemctl status nvidia-fabricmanager; nvidia-smi nvlink -s; then restart the machine"
        yield Finding(f"{name}.peers", value, WARNING, "collectives are slower", fix)
    elif len(reached) < len(others):
        fix = "for cards that can: switch off ACS and the IOMMU in the BIOS; GeForce cards cannot"
        yield Finding(f"{name}.peers", value, WARNING, "collectives go through host memory", fix)
    else:
        yield Finding(f"{name}.peers", value)
