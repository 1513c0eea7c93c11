"""`--matmul-dtype auto`: a site multiplies in fp8 only where that is faster on this device, its casts included.

A model of two layers with the run's shapes, and hardly any vocabulary, trains for a few steps: once in the model's
dtype, once for each kind of site with that alone in fp8, and once with all that were faster. What is timed is whole
steps, so producers that write copies, casts after attention and the optimizer's copies of the weights all count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from llmq.backends import Backend
from llmq.engine.measure import Clock, measure
from llmq.model.optimizer import Hyperparameters
from llmq.model.parameters import layer_maps
from llmq.plan.precision import Precision, block_sites
from llmq.plan.spec import Spec
from llmq.screen import Report, counted, unreported

LAYERS, VOCAB = 2, 1024  # of the model that is timed
STEPS, MOST_MICRO_STEPS = 5, 8


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


def choose(
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
