"""How fast a GPU multiplies as a run begins, as a share of its card's peak: a slow or throttled one is named.

It takes a few milliseconds of products (and what cuBLAS takes to start, which is not needed again). A free card reaches
60% to 80% of its papers' peak on this product; one that is hot, short of power or shared with others does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from llmq.hardware import device as devices
from llmq.hardware import nvml
from llmq.hardware.cards import TERA
from llmq.hardware.device import Device
from llmq.hardware.nvml import Reading

SLOW = 0.55  # of the peak
BROKEN = {"hardware slowdown", "temperature", "hardware temperature", "power brake"}  # reasons at any speed
LOAD_S = 0.05  # of products while clock and power are read
LOAD_SIZE = 4096


@dataclass(frozen=True)
class GemmSpeed:
    """FLOP/s of a product, the card's peak, NVML's reading (of the working GPU if it is slow), other processes."""

    flops: float
    peak: float
    reading: Reading = field(default_factory=Reading)
    others: int = 0

    @property
    def share(self) -> float:
        """Share of the peak."""
        return self.flops / self.peak

    @property
    def line(self) -> str:
        """`712 TFLOP/s, 72% of the card's peak`."""
        return f"{self.flops / TERA:.3g} TFLOP/s, {100 * self.share:.0f}% of the card's peak"

    @property
    def warning(self) -> str | None:
        """What is wrong with the card, with clocks, power and what slows it down; None if it is as it should be."""
        slowed = self.reading.throttled or ()
        if self.share >= SLOW and not BROKEN & set(slowed):
            return None
        what = "is slow" if self.share < SLOW else "is being slowed down"
        facts = [
            f"{name}{now:.0f}{f' of {most:.0f}' if most is not None else ''} {unit}"
            for name, now, most, unit in (
                ("SM clock ", self.reading.sm_mhz, self.reading.max_sm_mhz, "MHz"),
                ("", self.reading.watts, self.reading.max_watts, "W"),
                ("", self.reading.celsius, None, "C"),
            )
            if now is not None
        ]
        facts += [f"slowed down by {', '.join(slowed)}"] if slowed else []
        facts += [f"{self.others} other process{'es' if self.others > 1 else ''} on it"] if self.others else []
        seen = "; ".join(facts) or "NVML does not say why"
        return f"This GPU {what}: matrix products run at {self.line} of {self.peak / TERA:.4g} ({seen})"


def measure(where: Device) -> GemmSpeed | None:
    """The speed of a GPU that is here; None for the CPU, a planned card, and a card without a peak in the table."""
    if where.gpu is None or where.card is None:
        return None
    uuid = where.gpu.uuid
    found = GemmSpeed(devices.measured_cuda_peak("fp16"), where.card.peaks["bf16"], nvml.read(uuid) or Reading())
    if found.warning is None:
        return found
    reading = _while_working(uuid, found.flops) or found.reading
    return GemmSpeed(found.flops, found.peak, reading, nvml.num_others(uuid) or 0)


def _while_working(uuid: str, flops: float) -> Reading | None:
    """NVML's reading while products are running."""
    import cupy

    a = cupy.ones((LOAD_SIZE, LOAD_SIZE), cupy.float16)
    out = cupy.matmul(a, a)
    for _ in range(math.ceil(LOAD_S * flops / (2 * LOAD_SIZE**3))):
        cupy.matmul(a, a, out=out)
    reading = nvml.read(uuid)
    cupy.cuda.get_current_stream().synchronize()
    del a, out
    cupy.get_default_memory_pool().free_all_blocks()
    return reading
