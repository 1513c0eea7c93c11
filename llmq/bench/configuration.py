"""A configuration of `llmq-bench`: planned as `llmq-train` plans it, and its steps timed."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from llmq.adapters.lora import Lora
from llmq.adapters.several import alike
from llmq.backends import Backend, open_backend
from llmq.bench.ceilings import Machine
from llmq.bench.ladder import ladder
from llmq.bench.results import adapters_in_words, result_of
from llmq.comm.world import ALONE, World
from llmq.data.batches.batch import Batch
from llmq.engine.advice import USUAL_STEPS, refuse_if_too_large
from llmq.engine.bound_plan import make_ready
from llmq.engine.measure import Clock, CudaClock, Speed, measure_plan
from llmq.hardware import device
from llmq.hardware.device import Device
from llmq.options.bench import BenchOptions
from llmq.options.parse import Options
from llmq.plan import memory, precision
from llmq.plan.plan import Plan, make_plan
from llmq.plan.precision import Precision
from llmq.plan.remedies import with_fitting_chunks
from llmq.plan.spec import Spec
from llmq.screen import Report, Screen, unreported
from llmq.training.facts import Facts
from llmq.training.fit import SEARCHING, fitted
from llmq.training.room import limits_of

ROOM = 0.95  # of the free memory, for a plan that models what cuDNN will need


@dataclass(frozen=True)
class Defaults:
    """Defaults for a kind of device; it is sure to reach `share` of the speed of light."""

    models: tuple[str, ...]
    tokens: int  # of a step
    seq_len: int
    batch_size: int  # at most
    share: float


DEFAULTS = {
    "cuda": Defaults(("Qwen2.5-0.5B", "Qwen2.5-1.5B"), tokens=524_288, seq_len=1024, batch_size=32, share=0.25),
    "cpu": Defaults(("tiny_llama3_50m",), tokens=1024, seq_len=128, batch_size=1, share=0.06),
}


@dataclass(frozen=True)
class Configuration:
    """A model's shape on a device, and the options of llmq-train that it is planned with; some of them were `given`."""

    model: str
    dtype: str
    facts: Facts
    flat: Mapping[str, Any]
    given: frozenset[str]
    batch_size: int | None = None  # None: as many as fit
    at_once: int = 1  # equal adapters, which share the rows

    @property
    def name(self) -> str:
        """`Qwen2.5-0.5B bf16 32x1024, 8 adapters of rank 16 on nf4`."""
        size = f" {self.batch_size}x{self.flat['seq_len']}" if self.batch_size else ""
        return f"{self.model} {self.dtype}{size}{adapters_in_words({**self.flat, 'adapters_at_once': self.at_once})}"

    @property
    def precision(self) -> Precision:
        """What is stored and multiplied in which dtype."""
        return precision.resolve(self.options().precision, self.facts.config)

    @property
    def multiplied(self) -> tuple[str, ...]:
        """Dtypes of the matrix products of a run; attention's are the model's."""
        return self.precision.matmul, self.precision.head, self.precision.model

    @property
    def is_deterministic(self) -> bool:
        """Whether every run gives the same bits; the CPU's always do."""
        return self.facts.where.kind == "cpu" or bool(self._settings["deterministic"])

    @property
    def _settings(self) -> Mapping[str, Any]:
        return device.backend_settings(self.options().system, self.facts.where)

    def options(self, batch_size: int = 1, grad_accumulation: int = 1) -> Options:
        """The options of a run with micro-batches of this size."""
        return Options.parse({**self.flat, "batch_size": batch_size, "grad_accumulation": grad_accumulation})

    def spec(self, options: Options) -> Spec:
        """What is planned. An update in backward clips by the last norm, as there is no other."""
        spec = self.facts.spec(options, precision.resolve(options.precision, self.facts.config))
        method = spec.adapters
        if self.at_once > 1 and isinstance(method, Lora):
            method = alike(method, self.at_once, spec.batch_size)
        by_last = spec.memory.fused or memory.is_to_fit(options.memory)  # which may choose it
        return replace(spec, hyper=replace(spec.hyper, clips_by_last=by_last), adapters=method)

    def on_ranks(self, rank: int, size: int, level: int) -> Configuration:
        """The same on one of several ranks, which share what this level shares."""
        return replace(self, facts=replace(self.facts, rank=rank, size=size), flat={**self.flat, "zero_level": level})

    def open_backend(self, kind: str | None = None, world: World = ALONE) -> Backend:
        """The backend of the device, or one of another kind."""
        return open_backend(kind or self.facts.where.kind, world=world, **self._settings)


def fitting_plan(request: BenchOptions, one: Configuration, backend: Backend) -> Plan:
    """The plan with the batch that was asked for, or the largest that fits, or the one that --fit takes.
    MemoryLimitError if none fits.

    Automatic chunks of the attention backward rise where the batch cannot get smaller.
    """
    where, options = one.facts.where, one.options()
    defaults = DEFAULTS[where.kind]
    free_bytes = device.memory_bytes(where)[1]
    modelled = one.open_backend("planned") if where.kind == "cuda" else backend
    if memory.is_to_fit(options.memory):
        plan = _chosen_plan(one, backend, request.tokens_per_step or defaults.tokens)
    else:
        most = defaults.batch_size
        halves = [most >> shift for shift in range(most.bit_length())]
        sizes = [one.batch_size] if one.batch_size else [n for n in halves if n % one.at_once == 0] or [one.at_once]
        fitting = (size for size in sizes if _plan(one, size, modelled).total_bytes <= ROOM * free_bytes)
        plan = _plan(one, next(fitting, sizes[-1]), backend)
        while plan.total_bytes > free_bytes and not one.batch_size and plan.spec.batch_size % (2 * one.at_once) == 0:
            plan = _plan(one, plan.spec.batch_size // 2, backend)
    if memory.chooses_attention_chunks(options.memory):
        plan = with_fitting_chunks(plan, free_bytes, backend.scratch_bytes)
    refuse_if_too_large(plan, limits_of(options, where, backend, USUAL_STEPS))
    return plan


def _chosen_plan(one: Configuration, backend: Backend, tokens: int) -> Plan:
    """The plan that --fit takes for steps of `tokens`; the settings are shown on stderr."""
    samples = max(tokens // one.flat["seq_len"], 1)
    scratch = (one.open_backend("planned").scratch_bytes, backend.scratch_bytes)
    screen = Screen(sys.stderr)
    with screen.task(f"{SEARCHING}, of {one.name}") as report:
        about = (one.options(1, samples), one.spec, one.facts.where, *scratch, samples)
        found = fitted(*about, fixed=one.given, report=report)
    for line in found.lines:
        screen.line(line)
    assert found.plan is not None
    return found.plan


def _plan(one: Configuration, batch_size: int, backend: Backend) -> Plan:
    return make_plan(one.spec(one.options(batch_size)), backend.scratch_bytes)


def clock_of(where: Device) -> Clock:
    """What times the work of a device."""
    return CudaClock() if where.kind == "cuda" else Clock()


def timed(
    request: BenchOptions,
    plan: Plan,
    backend: Backend,
    where: Device,
    tokens: int,
    name: str,
    *,
    title: str = "Measuring",
    world: World = ALONE,
    batches: Sequence[Batch] | None = None,
    **settings: Any,
) -> Speed:
    """Times steps of `tokens` on this rank; the first rank shows bars. `settings` are those of `measure_plan`."""
    screen = Screen(sys.stderr)

    def task(what: str) -> AbstractContextManager[Report]:
        return screen.task(what) if world.rank == 0 else nullcontext(unreported)

    with task(f"Timing the matrix products of {name}") as report:
        make_ready(plan, backend, report)
    world.gather(None)  # no rank times its steps while another one still times products
    with task(f"{title} {name}") as report:
        return measure_plan(
            plan,
            backend,
            clock_of(where),
            tokens_per_step=tokens,
            steps=request.steps,
            warmup=request.warmup,
            batches=batches,
            uuid=where.gpu.uuid if where.gpu else None,
            report=report,
            say=screen.line if world.rank == 0 else lambda line: None,
            **settings,
        )


def measured_alone(
    request: BenchOptions,
    one: Configuration,
    plan: Plan,
    machine: Machine,
    tokens: int,
    backend: Backend | None = None,
    limit_s: float = math.inf,
) -> dict[str, Any]:
    """The result of one GPU, or of the CPU, in steps of `tokens`."""
    speed = timed(
        *(request, plan, backend or one.open_backend(), machine.where, tokens, one.name),
        single_ops=request.single_ops,
        limit_s=limit_s,
    )
    return result_of(one.model, one.dtype, speed, ladder(speed, machine.ceilings), machine, one.is_deterministic)
