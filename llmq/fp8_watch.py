"""Errors of fp8 copies over a run: what the log says of them, which sites are warned of, which should leave fp8.

A copy's quality is its signal-to-noise ratio, 10 log10(sum of x^2 / sum of (x - copy)^2): rounding alone leaves 31 dB
in e4m3 and 25 dB in e5m2; clipping and flushing to zero cost the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmq.plan.plan import SCALE_STRIDE, Plan
from llmq.plan.precision import Watching

LEAST_SNR_DB = {"e4m3": 22.0, "e5m2": 17.0}
PATIENCE = 2  # readings in a row below that before a site is named


@dataclass(frozen=True)
class CopyError:
    """One reading of one copy: `name` is that of its scale, such as `3.mlp.act@e4m3`; `sites` read it."""

    name: str
    sites: tuple[str, ...]
    amax: float
    snr_db: float | None  # None: nothing but zeros, or no error
    clipped: float  # share of all numbers that saturate
    flushed: float  # share of all numbers that become zero

    @classmethod
    def of(cls, name: str, sites: Sequence[str], fields: Iterable[float]) -> CopyError:
        """From the six numbers of `quantization_error`."""
        amax, power, noise, clipped, flushed, count = (float(x) for x in fields)
        snr = 10 * math.log10(power / noise) if power > 0 and noise > 0 and math.isfinite(power / noise) else None
        return cls(name, tuple(sites), amax, snr, clipped / max(count, 1.0), flushed / max(count, 1.0))

    @property
    def is_low(self) -> bool:
        """Whether the copy stands badly for its value."""
        return self.snr_db is not None and self.snr_db < LEAST_SNR_DB[self.name.rsplit("@", 1)[1]]


def summary(errors: Sequence[CopyError]) -> str:
    """`fp8: 96 copies, worst 3.mlp.act@e4m3 28.1 dB (0.01% clipped, 1.2% flushed)`."""
    known = [error for error in errors if error.snr_db is not None]
    if not known:
        return f"fp8: {len(errors)} copies, all exact"
    worst = min(known, key=lambda error: error.snr_db or 0.0)
    return (
        f"fp8: {len(errors)} copies, worst {worst.name} {worst.snr_db:.1f} dB "
        f"({100 * worst.clipped:.2g}% clipped, {100 * worst.flushed:.2g}% flushed)"
    )


def due(options: Watching, step: int) -> bool:
    """Whether to read after `step` updates: at the start, and after each n-th."""
    return options.every > 0 and step % options.every == 0


def judge(errors: Iterable[CopyError], low: Mapping[str, int]) -> tuple[dict[str, int], dict[str, CopyError]]:
    """Low readings in a row of each site, which were `low` before; and sites that just had the PATIENCE-th in a row.

    Those come with their worst copy.
    """
    worst: dict[str, CopyError] = {}
    for error in errors:
        for site in error.sites if error.is_low else ():
            if site not in worst or (error.snr_db or 0.0) < (worst[site].snr_db or 0.0):
                worst[site] = error
    counts = {site: low.get(site, 0) + 1 for site in worst}
    return counts, {site: error for site, error in worst.items() if counts[site] == PATIENCE}


def carried(read: Callable[[str], np.ndarray], old: Plan, new: Plan) -> Callable[[str], np.ndarray]:
    """State of a run under the plan `old`, read by name, as one under `new`, which has fewer delayed scales."""
    places = [slice(SCALE_STRIDE * i, SCALE_STRIDE * (i + 1)) for i in map(old.scales.index, new.scales)]

    def carry(name: str) -> np.ndarray:
        values = read(name)
        if name not in ("scale:scales", "scale:history", "scale:amax", "scale:limits"):
            return values
        return np.concatenate([values[..., place] for place in places], axis=-1)

    return carry
