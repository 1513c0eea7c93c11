"""What `llmq-bench` measures: shapes of models in dtypes, checked as a whole, and planned as `llmq-train` plans them.

Options of `llmq-train` stay what they are: they go through the same description and the same resolvers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmq.adapters import resolve as adapters
from llmq.backends import Backend
from llmq.backends.opening import open_backend
from llmq.comm.world import ALONE, World
from llmq.disk import storage
from llmq.engine.advice import USUAL_STEPS, refuse_if_too_large
from llmq.engine.measure import Clock, CudaClock
from llmq.errors import LlmqError
from llmq.hardware import device
from llmq.hardware.device import Device
from llmq.model.config import from_folder
from llmq.model.presets import preset
from llmq.options.commands import BenchOptions
from llmq.options.field import refuse
from llmq.options.parse import Options
from llmq.plan import memory, precision
from llmq.plan.plan import Plan, make_plan
from llmq.plan.precision import Precision
from llmq.plan.remedies import with_fitting_chunks
from llmq.plan.spec import Spec
from llmq.screen import Screen
from llmq.training.fit import fitted
from llmq.training.ready import Facts

ROOM = 0.95  # of the free memory, for a plan that models what cuDNN will need
MOMENTS = ("opt_m_dtype", "opt_v_dtype")  # of adapters those of llmq-train
NARROW = {"model_dtype": "bf16", "opt_m_dtype": "bf16", "opt_v_dtype": "bf16"}
# Options of llmq-train by name of --dtypes; nothing is measured of the errors of fp8 copies.
MATMULS: dict[str, dict[str, Any]] = {
    "fp32": {"model_dtype": "fp32"},
    "bf16": NARROW,
    "e4m3": {**NARROW, "matmul_dtype": "e4m3", "log_fp8_every": 0},
}
OF_FP8 = ("gradient_dtype", "fp8_scaling", "head_dtype", "bf16_layers", "fp8_layers")
OF_DEVICE = ("device", "memory_limit", "host_memory_limit", "deterministic", "memcpy_all_gather")
GENERATED = {"from_scratch": True, "train_file": "generated"}  # in place of data and weights


@dataclass(frozen=True)
class Defaults:
    """Defaults for a kind of device."""

    models: tuple[str, ...]
    tokens: int  # of a step
    seq_len: int
    batch_size: int  # at most


DEFAULTS = {
    "cuda": Defaults(("Qwen2.5-0.5B", "Qwen2.5-1.5B"), tokens=524_288, seq_len=1024, batch_size=32),
    "cpu": Defaults(("tiny_llama3_50m",), tokens=1024, seq_len=128, batch_size=1),
}


@dataclass(frozen=True)
class Configuration:
    """A model's shape on a device, and the options of llmq-train that it is planned with; some of them were `given`."""

    request: BenchOptions
    model: str
    dtype: str
    facts: Facts
    flat: Mapping[str, Any]
    given: frozenset[str]
    batch_size: int | None = None  # None: as many as fit

    @property
    def name(self) -> str:
        """`Qwen2.5-0.5B bf16 32x1024, rank 16 on nf4`."""
        return name_of({**self.flat, "dtype": self.dtype, "batch_size": self.batch_size})

    @property
    def where(self) -> Device:
        """The device."""
        return self.facts.where

    @property
    def defaults(self) -> Defaults:
        """Those of the device."""
        return DEFAULTS[self.where.kind]

    @property
    def precision(self) -> Precision:
        """What is stored and multiplied in which dtype."""
        return precision.resolve(self.options().precision, self.facts.config)

    @property
    def _settings(self) -> Mapping[str, Any]:
        return device.backend_settings(self.options().system, self.where)

    def options(self, batch_size: int = 1, grad_accumulation: int = 1) -> Options:
        """The options of a run with micro-batches of this size."""
        return Options.parse({**self.flat, "batch_size": batch_size, "grad_accumulation": grad_accumulation})

    def spec(self, options: Options) -> Spec:
        """What is planned. An update in backward clips by the last norm, as there is no other."""
        spec = self.facts.spec(options)
        by_last = spec.memory.fused or memory.is_to_fit(options.memory)  # which may choose it
        return replace(spec, hyper=replace(spec.hyper, clips_by_last=by_last))

    def on_ranks(self, rank: int, size: int, level: int) -> Configuration:
        """The same on one of several ranks, which share what this level shares."""
        return replace(self, facts=replace(self.facts, rank=rank, size=size), flat={**self.flat, "zero_level": level})

    def open_backend(self, kind: str | None = None, world: World = ALONE) -> Backend:
        """The backend of the device, or one of another kind."""
        return open_backend(kind or self.where.backend, world=world, **self._settings)

    def clock(self) -> Clock:
        """What times the work of the device."""
        return CudaClock() if self.where.kind == "cuda" else Clock()

    def fitting_plan(self, backend: Backend) -> Plan:
        """The plan with the batch that was asked for, or the largest that fits, or the one that --fit takes.
        MemoryLimitError if none fits.

        Automatic chunks of the attention backward rise where the batch cannot get smaller.
        """
        options, free_bytes = self.options(), device.memory_bytes(self.where)[1]
        if memory.is_to_fit(options.memory):
            plan = self._chosen_plan(backend)
        else:
            modelled = self.open_backend("planned") if self.where.kind == "cuda" else backend
            most = self.defaults.batch_size
            sizes = [self.batch_size] if self.batch_size else [most >> shift for shift in range(most.bit_length())]
            fitting = (size for size in sizes if self._plan(size, modelled).total_bytes <= ROOM * free_bytes)
            plan = self._plan(next(fitting, sizes[-1]), backend)
            while plan.total_bytes > free_bytes and not self.batch_size and plan.spec.batch_size > 1:
                plan = self._plan(plan.spec.batch_size // 2, backend)
        if memory.chooses_attention_chunks(options.memory):
            plan = with_fitting_chunks(plan, free_bytes, backend.scratch_bytes)
        refuse_if_too_large(plan, self.facts.limits(options, backend, USUAL_STEPS))
        return plan

    def _chosen_plan(self, backend: Backend) -> Plan:
        """The plan that --fit takes for steps of --tokens-per-step; the settings are shown on stderr."""
        samples = max((self.request.tokens_per_step or self.defaults.tokens) // self.flat["seq_len"], 1)
        screen = Screen(sys.stderr)
        about = (self.options(1, samples), self.spec, self.where, backend, samples)
        found = fitted(*about, fixed=self.given, task=lambda title: screen.task(f"{title}, of {self.name}"))
        for line in found.lines:
            screen.line(line)
        assert found.plan is not None
        return found.plan

    def _plan(self, batch_size: int, backend: Backend) -> Plan:
        return make_plan(self.spec(self.options(batch_size)), backend.scratch_bytes)


def name_of(about: Mapping[str, Any]) -> str:
    """`Qwen2.5-0.5B bf16`, with the batch `Qwen2.5-0.5B bf16 32x1024`, and with what else a result has,
    `Qwen2.5-0.5B bf16 32x1024 on 2 GPUs, level 1` or `Qwen2.5-7B bf16 16x1024, DoRA of rank 16 on nf4`."""
    size = f" {about['batch_size']}x{about['seq_len']}" if about["batch_size"] else ""
    many = f" on {about['gpus']} GPUs, level {about['zero_level']}" if about.get("gpus", 1) > 1 else ""
    name = f"{about['model']} {about['dtype']}{size}{many}"
    if not about.get("lora_rank"):
        return name
    base = f" on {about['base_dtype']}" if about.get("base_dtype") else ""
    return f"{name}, {'DoRA of rank' if about.get('dora') else 'rank'} {about['lora_rank']}{base}"


def shared(training: Mapping[str, Any]) -> Options:
    """What all configurations have of llmq-train's options: those of the device."""
    return Options.parse({"model": "any", **GENERATED, **{k: v for k, v in training.items() if k in OF_DEVICE}})


def multiplied(wanted: list[Configuration]) -> set[str]:
    """Dtypes of the matrix products of all configurations; attention's are the model's."""
    found = [one.precision for one in wanted]
    return {dtype for each in found for dtype in (each.matmul, each.head, each.model)}


def configurations(
    request: BenchOptions, training: Mapping[str, Any], where: Device, num_ranks: int = 1
) -> list[Configuration]:
    """Every model in every dtype and batch, checked. UsageError with all problems at once, StorageError if --save could
    not be written."""
    problems, configs, defaults = list[str](), {}, DEFAULTS[where.kind]
    for name in request.models or defaults.models:
        try:
            configs[name] = from_folder(Path(name)) if Path(name).is_dir() else preset(name)
        except LlmqError as error:
            problems.append(f"--models {name}: {error}")
    usual = "fp32" if where.kind == "cpu" and not request.models else "bf16"
    may_be_fp8 = where.kind == "cuda" and not request.models and device.has_fp8(where)
    dtypes = request.dtypes or ((usual, "e4m3") if may_be_fp8 else (usual,))
    if unknown_dtypes := [name for name in dtypes if name not in MATMULS]:
        problems.append(f"--dtypes {', '.join(unknown_dtypes)}: known are {', '.join(MATMULS)}")
    seq_len = request.seq_len or defaults.seq_len
    problems += [*_odd_options(request, training, where, num_ranks), *_odd_tokens(request, seq_len, num_ranks)]
    found = []
    for name, config in configs.items():
        for dtype in dtypes if not unknown_dtypes else ():
            flat = {"model": name, "seq_len": seq_len, **_recipe(request, training, dtype, with_fp8="e4m3" in dtypes)}
            try:
                one = Configuration(request, name, dtype, Facts(config, where), flat, frozenset(training))
                adapters.resolve(one.options().adapters, config)  # for its errors, before anything is measured
                stored = one.precision
                device.refuse_dtypes(where, stored.matmul, stored.head, scaling=stored.scaling, option="--dtypes")
                found += [replace(one, batch_size=size) for size in request.batch_size or (None,)]
            except LlmqError as error:
                problems.append(str(error))
    refuse(list(dict.fromkeys(problems)))  # a problem of every model is shown once
    if request.save:
        with storage(Path(request.save), advice="name another place with --save"):
            Path(request.save).open("a").close()
    return found


def _recipe(request: BenchOptions, training: Mapping[str, Any], dtype: str, *, with_fp8: bool) -> dict[str, Any]:
    """Options of llmq-train in a dtype. Those of fp8 apply to e4m3 only, if that is among the dtypes."""
    left_out = OF_FP8 if with_fp8 and dtype != "e4m3" else ()
    has_own_moments = "lora_rank" not in training
    return {
        **GENERATED,
        **{f"recompute_{name}": True for name in request.recompute},
        **{key: value for key, value in MATMULS[dtype].items() if has_own_moments or key not in MOMENTS},
        **{key: value for key, value in training.items() if key not in left_out},
    }


def _odd_options(request: BenchOptions, training: Mapping[str, Any], where: Device, num_ranks: int) -> Iterator[str]:
    """Messages on options that do not go together, or not with `num_ranks`."""
    fits = training.get("fit")
    if unknown := [name for name in request.recompute if f"recompute_{name}" not in memory.ROLES]:
        known = ", ".join(flag.removeprefix("recompute_") for flag in memory.ROLES)
        yield f"--recompute {','.join(unknown)}: known are {known}"
    if fits and request.batch_size:
        yield "--fit chooses the size of a micro-batch: leave out --batch-size"
    if fits and "matmul" in (training.get("fit_may") or ""):
        yield "--fit-may matmul: --dtypes says what is multiplied, each for itself: allow states, or leave it out"
    if fits and num_ranks > 1:  # each would search for itself
        yield "--fit is for one GPU: leave out --gpus"
    if request.zero_levels and num_ranks == 1:
        yield "--zero-levels is for several GPUs: add --gpus N, or leave it out"
    if training.get("memcpy_all_gather") is not None and (num_ranks == 1 or where.kind == "cpu"):
        yield "--memcpy-all-gather is for several GPUs: add --gpus N, or leave it out"


def _odd_tokens(request: BenchOptions, seq_len: int, num_ranks: int) -> Iterator[str]:
    """A message if --tokens-per-step is not a whole number of micro-batches of all ranks."""
    tokens = request.tokens_per_step or 0
    for size in request.batch_size or (None,):
        micro = (size or 1) * seq_len * num_ranks
        if tokens % micro:
            what = f"micro-batches of {size} x {seq_len}" if size else f"{seq_len}, --seq-len"
            what += f", on {num_ranks} GPUs" if num_ranks > 1 else ""
            near = max(1, tokens // micro) * micro
            yield f"--tokens-per-step {tokens} is not a multiple of {what}: use {near}"
