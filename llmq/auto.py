"""`--matmul-dtype auto`: a site multiplies in fp8 only where that is faster on this device, its casts included.

A model of two layers with the run's shapes, and hardly any vocabulary, trains for a few steps: once in the model's
dtype, once for each kind of site with that alone in fp8, and once with all that were faster. What is timed is whole
steps, so producers that write copies, casts behind attention and the optimizer's copies of the weights all count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmq.backends import Backend
from llmq.config import ModelConfig
from llmq.engine import Engine
from llmq.optimizer import Hyperparameters
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.plan.precision import SITES, Precision, site_names
from llmq.report.bench import random_parameters, zipf_batch

LAYERS, VOCAB = 2, 1024  # of the model that is timed
STEPS, MOST_MICRO_STEPS = 5, 8


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a layer per micro-step, the optimizer's share included."""

    wide_ms: float  # no site in fp8
    site_ms: Mapping[str, float]  # by site: that one alone in fp8
    chosen_ms: float  # the chosen ones in fp8
    chosen: tuple[str, ...]

    def rows(self, dtype: str) -> dict[str, str]:
        """A line for each site, for the log."""
        lines = {
            site: f"{dtype} {self.wide_ms:.3f} ms, e4m3 {ms:.3f} ms a layer: {'e4m3' if site in self.chosen else dtype}"
            for site, ms in self.site_ms.items()
        }
        return {
            **lines,
            "together": f"{self.chosen_ms:.3f} ms a layer, {self.wide_ms / self.chosen_ms:.2f} times as fast",
        }


def choose(
    config: ModelConfig,
    precision: Precision,
    memory: Memory,
    backend: Backend,
    *,
    batch_size: int,
    seq_len: int,
    grad_accumulation: int,
) -> tuple[Precision, Timing]:
    """`precision`, whose matmuls are e4m3, without the sites that are no faster for it; and what was measured.

    Sites that are wide anyway stay so, and count as no faster.
    """
    names = site_names(config.num_layers)
    open_sites = tuple(site for site in SITES if any(n.endswith(site) and n not in precision.wide for n in names))
    windows = config.windows[:LAYERS] if config.windows else config.windows
    small = replace(config, num_layers=LAYERS, vocab_size=VOCAB, windows=windows)
    limits = replace(memory, head_chunks=1)
    micro_steps = min(grad_accumulation, MOST_MICRO_STEPS)

    def layer_ms(fp8: tuple[str, ...]) -> float:
        wide = tuple(name for name in site_names(LAYERS) if not name.endswith(fp8))
        dtypes = replace(precision, head=precision.model, wide=wide)
        return _step_ms(small, dtypes, limits, backend, batch_size, seq_len, micro_steps) / LAYERS / micro_steps

    wide_ms = layer_ms(())
    site_ms = {site: layer_ms((site,)) for site in open_sites}
    chosen = tuple(site for site, ms in site_ms.items() if ms < wide_ms)
    chosen_ms = layer_ms(chosen) if chosen else wide_ms
    if chosen_ms >= wide_ms:
        chosen, chosen_ms = (), wide_ms
    timing = Timing(wide_ms, site_ms, chosen_ms, chosen)
    if not chosen:
        return precision.without_fp8(), timing
    return precision.without(name for name in names if not name.endswith(chosen)), timing


def _step_ms(
    config: ModelConfig, precision: Precision, memory: Memory, backend: Backend, b: int, t: int, micro_steps: int
) -> float:
    """Median milliseconds of an optimizer step of so many micro-steps, once its programs are compiled and captured."""
    numbers = {"batch_size": b, "seq_len": t}
    plan = make_plan(config, precision, memory, Hyperparameters(), **numbers, scratch_bytes=backend.scratch_bytes)  # type: ignore[arg-type]
    engine = Engine(plan, backend)
    engine.load(random_parameters(plan, 0))
    batch = zipf_batch(config.vocab_size, b, t, 0)
    if engine.needs_warm_up:
        engine.warm_up(*batch)
    spent = []
    for step in range(1, 3 + STEPS):
        began = time.perf_counter()
        for micro_step in range(micro_steps):
            engine.micro_step(*batch, first=micro_step == 0)
        engine.update(step, 1e-5)  # waits for the device
        spent.append(1e3 * (time.perf_counter() - began))
    return statistics.median(spent[2:])
