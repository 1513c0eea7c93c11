"""Which sites multiply in fp8: timed before a run (`--matmul-dtype auto`), and watched while it trains.

A site multiplies in fp8 only where that is faster on this device, its casts included. A model of two layers with the
run's shapes, and hardly any vocabulary, trains for a few steps: once in the model's dtype, once for each kind of site
with that alone in fp8, and once with all that were faster. What is timed is whole steps, so producers that write
copies, casts after attention and the optimizer's copies of the weights all count.

A copy's quality is its signal-to-noise ratio, 10 log10(sum of x^2 / sum of (x - copy)^2): rounding alone leaves 31 dB
in e4m3 and 25 dB in e5m2; clipping and flushing to zero cost the rest. Sites whose copies stay worse are named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from llmq.backends import Backend
from llmq.data.batches.batch import Batch
from llmq.engine.advice import Limits, lacking
from llmq.engine.measure import Clock, measure
from llmq.hardware import device
from llmq.model.optimizer import Hyperparameters
from llmq.model.parameters import HEAD, layer_maps
from llmq.plan.plan import SCALE_STRIDE, Plan
from llmq.plan.precision import Precision, block_sites
from llmq.plan.spec import Spec
from llmq.screen import Report, counted, unreported
from llmq.training.hooks import Hook, RunView
from llmq.training.ready import Ready

LEAST_SNR_DB = {"e4m3": 22.0, "e5m2": 17.0}
LAYERS, VOCAB = 2, 1024  # of the model that is timed
STEPS, MOST_MICRO_STEPS = 5, 8
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
        """Whether the copy is a bad one of its value."""
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


class Fp8Watch(Hook):
    """Reads the errors of all fp8 copies where that is due, and lets sites fall back: `switch` makes the run continue
    under another plan."""

    key = "fp8"

    def __init__(self, ready: Ready, switch: Callable[[Plan], None]) -> None:
        self._ready, self._log, self._ranks, self._switch = ready, ready.log, ready.ranks, switch
        self._low: Mapping[str, int] = {}  # low readings in a row, by site
        self._fell_back: tuple[str, ...] = ()  # sites that left fp8 in this run

    def state(self) -> dict[str, Any]:
        """Both of these."""
        return {"low": dict(self._low), "fell_back": list(self._fell_back)}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes both."""
        self._low, self._fell_back = state["low"], tuple(state["fell_back"])

    def before_step(self, run: RunView, batch: Batch) -> None:
        """Reads if that is due, on a step's first micro-batch."""
        every = self._ready.watching.every
        if not (run.engine.plan.observed and every and run.progress.step % every == 0):
            return
        low, named = judge(self._read(run, batch), self._low)
        self._say(named)
        # The checkpoint of a fallback has the counts before this reading: a run continued from it reads again.
        left = self._fall_back(run, tuple(named)) if named and self._ready.watching.fallback else ()
        self._low, self._fell_back = low, (*self._fell_back, *left)

    def _read(self, run: RunView, batch: Batch) -> list[CopyError]:
        """A reading of every copy, which the log gets."""
        found = np.array(self._ranks.all_of(run.engine.observe(batch).tolist()))
        # Of the batches and shares of all ranks: the largest of magnitudes, the sums of the rest.
        found = np.concatenate([found[..., :1].max(axis=0), found[..., 1:].sum(axis=0)], axis=-1)
        fields = zip(run.engine.plan.observed.items(), found.tolist(), strict=True)
        errors = [CopyError.of(name, sites, row) for (name, sites), row in fields]
        self._log.say(summary(errors))
        self._log.record("fp8", step=run.progress.step, copies=[asdict(error) for error in errors])
        return errors

    def _say(self, named: Mapping[str, CopyError]) -> None:
        """A notice for each site that stays low."""
        for site, error in named.items():
            option = (
                f"--head-dtype {self._ready.plan.spec.precision.model}" if site == HEAD else f"--bf16-layers {site}"
            )
            advice = "" if self._ready.watching.fallback else f": {option} or --fp8-fallback would take it out of fp8"
            shares = f"{100 * error.clipped:.2g}% clipped, {100 * error.flushed:.2g}% flushed to zero"
            where = f"The fp8 copy {error.name} of {site}"
            self._log.notice(f"{where} stays at {error.snr_db:.1f} dB ({shares}){advice}")

    def _fall_back(self, run: RunView, sites: tuple[str, ...]) -> tuple[str, ...]:
        """Continues with `sites` in the model's dtype; returns them, or none of them if that does not fit in memory."""
        ready, old, names = self._ready, run.engine.plan, ", ".join(sites)
        plan = ready.replan(old.spec.precision.without(sites), old.total_bytes)
        free = min(self._ranks.all_of(device.memory_bytes(ready.device)[1] + old.total_bytes))
        if lack := lacking(plan, Limits(free)):
            self._log.notice(f"{names} cannot leave fp8: {lack}")
            return ()
        self._switch(plan)
        step = run.progress.step + 1
        self._log.notice(f"{names}: in {plan.spec.precision.model} from step {step} on", fell_back=list(sites))
        return sites


def carried(read: Callable[..., np.ndarray], old: Plan, new: Plan) -> Callable[..., np.ndarray]:
    """State of a run under the plan `old`, read by name, as one under `new`, which has fewer delayed scales."""
    places = [slice(SCALE_STRIDE * i, SCALE_STRIDE * (i + 1)) for i in map(old.scales.index, new.scales)]

    def carry(name: str, *box: tuple[int, ...]) -> np.ndarray:
        values = read(name, *box)
        if name not in ("scale:scales", "scale:history", "scale:amax", "scale:limits"):
            return values
        return np.concatenate([values[..., place] for place in places], axis=-1)

    return carry


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a layer per micro-step, the optimizer's share included."""

    wide_ms: float  # no site in fp8
    site_ms: Mapping[str, float]  # by site: that one alone in fp8
    together_ms: float  # all that were faster alone in fp8; `wide_ms` if none was
    chosen: tuple[str, ...]  # those, if they were faster together

    def rows(self, dtype: str) -> dict[str, str]:
        """A line for each site, for the log."""
        lines = {
            site: f"{dtype} {self.wide_ms:.3f} ms, e4m3 {ms:.3f} ms a layer: {'e4m3' if site in self.chosen else dtype}"
            for site, ms in self.site_ms.items()
        }
        if self.chosen:
            together = f"{self.together_ms:.3f} ms a layer, {self.wide_ms / self.together_ms:.2f} times as fast"
        elif any(ms < self.wide_ms for ms in self.site_ms.values()):
            together = f"{self.together_ms:.3f} ms a layer, no faster than {dtype}: every site stays {dtype}"
        else:
            together = f"no site was faster in e4m3: every site stays {dtype}"
        return {**lines, "together": together}


def timed_sites(
    spec: Spec, grad_accumulation: int, backend: Backend, report: Report = unreported
) -> tuple[Precision, Timing]:
    """The dtypes of `spec`, whose matmuls are e4m3, without the sites that are no faster for it; and what was measured.

    Sites that are wide anyway stay so, and count as no faster.
    """
    config, precision, batch_size, seq_len = spec.config, spec.precision, spec.batch_size, spec.seq_len
    names = block_sites(config)
    open_sites = tuple(
        site for site in layer_maps(config) if any(n.endswith(site) and n not in precision.wide for n in names)
    )
    windows = config.windows[:LAYERS] if config.windows else config.windows
    small = replace(config, num_layers=LAYERS, vocab_size=VOCAB, windows=windows)
    limits = replace(spec.memory, head_chunks=1)
    micro_steps = min(grad_accumulation, MOST_MICRO_STEPS)

    def layer_ms(fp8: tuple[str, ...]) -> float:
        wide = tuple(name for name in block_sites(small) if not name.endswith(fp8))
        dtypes = replace(precision, head=precision.model, wide=wide)
        run = {"steps": STEPS, "warmup": 2, "tokens_per_step": micro_steps * batch_size * seq_len, "single_ops": False}
        timed = Spec(small, dtypes, limits, Hyperparameters(), batch_size, seq_len)
        speed = measure(timed, backend, Clock(), **run)  # the host's clock: a step ends with waiting for the device
        return speed.micro_batch_ms / LAYERS

    runs = [(), *((site,) for site in open_sites)]
    wide_ms, *found = [layer_ms(sites) for sites in counted(runs, len(runs) + 1, report)]
    site_ms = dict(zip(open_sites, found, strict=True))
    faster = tuple(site for site, ms in site_ms.items() if ms < wide_ms)
    together_ms = layer_ms(faster) if faster else wide_ms
    chosen = faster if together_ms < wide_ms else ()
    timing = Timing(wide_ms, site_ms, together_ms, chosen)
    if not chosen:
        return precision.without_fp8(), timing
    return precision.without(name for name in names if not name.endswith(chosen)), timing
