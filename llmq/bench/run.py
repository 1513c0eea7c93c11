"""The runs of `llmq-bench`: options checked as a whole, and the models, batches and steps where none were given.

A configuration is planned as `llmq-train` would plan it: its options go through the same description and the same
resolvers. Without `--models` the device decides: models that fit its memory, in bf16 and in fp8 where the card has it,
as many as can be measured within LIMIT_S at the speed of those before. A measurement that takes longer is cut short.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from llmq.backends import Backend, open_backend
from llmq.bench import table as bench_table
from llmq.bench.ceilings import Ceilings, measure_ceilings
from llmq.bench.ladder import ladder
from llmq.bench.ranks import RankBench, other_processes
from llmq.bench.results import Change, adapters_in_words, compare, document, load, require_common, result_of, save
from llmq.comm.join import copied_in_words, join_world
from llmq.comm.launch import gpu_index, recognised
from llmq.comm.peer_copies import Copying
from llmq.comm.world import ALONE, World
from llmq.engine.bound_plan import make_ready
from llmq.engine.measure import Clock, CudaClock, measure_plan
from llmq.errors import LlmqError, MemoryLimitError, StorageError, UsageError
from llmq.hardware import blas
from llmq.hardware import device as devices
from llmq.hardware.device import Device
from llmq.model import speed_of_light as sol
from llmq.model.config import ModelConfig, from_folder
from llmq.model.optimizer import Hyperparameters
from llmq.model.parameters import padded_vocab
from llmq.model.presets import preset
from llmq.options.parse import Options
from llmq.plan import adapters, memory, precision
from llmq.plan.advice import refuse_if_too_large, with_fitting_chunks
from llmq.plan.memory import ROLES
from llmq.plan.plan import Plan, make_plan
from llmq.plan.precision import Precision
from llmq.plan.spec import Spec
from llmq.screen import Screen
from llmq.stores.sharding import ALONE as UNSHARED
from llmq.stores.sharding import Sharding
from llmq.tensor import DTYPES

MOMENTS = ("opt_m_dtype", "opt_v_dtype")  # of adapters those of llmq-train
NARROW = {"model_dtype": "bf16", "opt_m_dtype": "bf16", "opt_v_dtype": "bf16"}
MATMULS = {  # options of llmq-train by name of --dtypes
    "fp32": {"model_dtype": "fp32"},
    "bf16": NARROW,
    "e4m3": {**NARROW, "matmul_dtype": "e4m3"},
}
OF_FP8 = ("gradient_dtype", "fp8_scaling", "head_dtype", "bf16_layers", "fp8_layers")
ROOM = 0.95  # of the free memory, for a plan that models what cuDNN will need
LIMIT_S = 165.0  # for all configurations that were chosen here: under three minutes with the start of Python
LADDER_S = 10.0  # of them: single ops, after the steps
START_S = 15.0  # of a configuration: kernels, algorithms, weights, ladder
DEFAULT_LEVEL = 1  # of several GPUs
CAUTION = 0.8  # of the last share of the speed of light is expected of the next


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
class BenchRequest:
    """The options of the command; None and () take the defaults. `recipe` are options of llmq-train."""

    models: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    device: str = "auto"
    memory_limit: str | None = None
    batch_size: int | None = None
    batch_sizes: tuple[int, ...] = ()  # each of them, in one table
    seq_len: int | None = None
    tokens_per_step: int | None = None
    steps: int = 10
    warmup: int = 3
    recompute: tuple[str, ...] = ()
    deterministic: bool = True
    recipe: Mapping[str, Any] = field(default_factory=dict)
    save: Path | None = None
    compare: Path | None = None
    tolerance: float | None = None
    markdown: bool = False
    gpus: int = 1
    zero_levels: tuple[int, ...] = ()
    memcpy_all_gather: bool | None = None
    command: str = "llmq-bench"


@dataclass(frozen=True)
class Wanted:
    """One configuration: a model's shape and the options of llmq-train that it is planned with."""

    model: str
    dtype: str
    config: ModelConfig
    precision: Precision
    flat: Mapping[str, Any]
    batch_size: int | None = None  # None: as many as fit

    @property
    def name(self) -> str:
        """`Qwen2.5-0.5B bf16 32x1024, rank 16 on nf4`."""
        size = f" {self.batch_size}x{self.flat['seq_len']}" if self.batch_size else ""
        return f"{self.model} {self.dtype}{size}{adapters_in_words(self.flat)}"


def run(request: BenchRequest) -> int:
    """Measures, prints and saves; returns the exit code: 1 for a regression beyond the tolerance.

    Of many ranks each measures, and the first one prints and saves.
    """
    place = recognised(os.environ, request.gpus)
    if place is None or place.size == 1:
        return _run(request, devices.pick(request.device, request.memory_limit), ALONE)
    where = devices.use(devices.pick(request.device, request.memory_limit), partial(gpu_index, place))
    world = join_world(place, where, Copying(request.memcpy_all_gather, False))
    try:
        return _run(request, where, world)
    finally:
        world.close()


def check(request: BenchRequest, where: Device, num_ranks: int = 1) -> tuple[list[Wanted], dict[str, Any] | None]:
    """What is measured, and what it is compared with; all is refused that can be before the first measurement."""
    wanted = configurations(request, where, num_ranks)
    old = load(request.compare) if request.compare else None
    if old is not None:
        require_common(old, [(one.model, one.dtype, one.flat["seq_len"]) for one in wanted])
    if request.save:
        _check_place(request.save)
    return wanted, old


def _run(request: BenchRequest, where: Device, world: World) -> int:
    if where.kind == "cpu":
        blas.use_threads()
    if world.size > 1:
        request = replace(request, zero_levels=request.zero_levels or (DEFAULT_LEVEL,))
    wanted, old = check(request, where, world.size)
    is_first = world.rank == 0
    console = Console(stderr=request.markdown, quiet=not is_first)  # with --markdown only that goes to stdout
    peaks, system = devices.peaks(where), devices.system_facts(where)
    dtypes = {dtype for one in wanted for dtype in multiplied(one.precision)}
    found = asdict(measure_ceilings(where.kind, dtypes)) if is_first else None  # while the others wait
    ceilings = Ceilings(**world.gather(found)[0])
    bench_table.show_machine(console, system, peaks, asdict(ceilings))
    if copied := copied_in_words(world):
        console.print(copied)
    results = []
    measuring = measured if world.size == 1 else partial(_measured_by_ranks, world=world)
    for result in measuring(request, wanted, where, peaks, ceilings):
        results.append(result)
        if not request.batch_sizes:
            bench_table.show(console, result)
    if request.batch_sizes:
        bench_table.show_sizes(console, results, [one.name for one in wanted])
    bench_table.show_ranks(console, results)
    content = document(results, request.command, system, peaks, ceilings)
    if not is_first:
        return 0
    if request.save:
        save(request.save, content)
    if request.markdown:
        print(bench_table.markdown(content))
    if old is None:
        return 0
    changes, lone = compare(old, content)
    bench_table.show_changes(console, str(request.compare), changes, lone)
    return _exit_code(console, changes, request.tolerance)


def _measured_by_ranks(
    request: BenchRequest,
    wanted: Sequence[Wanted],
    where: Device,
    peaks: Mapping[str, float],
    ceilings: Ceilings,
    *,
    world: World,
) -> Iterator[dict[str, Any]]:
    """The results of each configuration on one GPU, and on all at each level."""

    def plan(one: Wanted, backend: Backend, sharding: Sharding) -> Plan:
        return fitting_plan(request, one, where, backend, sharding)

    def alone(one: Wanted, plan: Plan, tokens: int) -> dict[str, Any]:
        backend = open_backend(where.kind, deterministic=request.deterministic)
        return _measure(request, one, plan, backend, where, tokens, peaks, ceilings, math.inf)

    tokens = DEFAULTS[where.kind].tokens
    return RankBench(request, where, world, peaks, ceilings, plan, alone, tokens).measured(wanted)


def _exit_code(console: Console, changes: Sequence[Change], tolerance: float | None) -> int:
    if tolerance is None:
        return 0
    slower = [change.name for change in changes if change.percent < -tolerance]
    if slower:
        console.print(f"Slower by more than {tolerance:g}%: {', '.join(slower)}", highlight=False)
    return 1 if slower else 0


def configurations(request: BenchRequest, where: Device, num_ranks: int = 1) -> list[Wanted]:
    """Every model in every dtype, checked. UsageError with all problems at once."""
    problems, configs = [], {}
    for name in request.models or DEFAULTS[where.kind].models:
        try:
            configs[name] = from_folder(Path(name)) if Path(name).is_dir() else preset(name)
        except LlmqError as error:
            problems.append(f"--models {name}: {error}")
    dtypes = request.dtypes or _default_dtypes(request, where)
    if unknown_dtypes := [name for name in dtypes if name not in MATMULS]:
        problems.append(f"--dtypes {', '.join(unknown_dtypes)}: known are {', '.join(MATMULS)}")
    if unknown := [name for name in request.recompute if f"recompute_{name}" not in ROLES]:
        known = ", ".join(flag.removeprefix("recompute_") for flag in ROLES)
        problems.append(f"--recompute {','.join(unknown)}: known are {known}")
    if request.tolerance is not None and request.compare is None:
        problems.append(f"--tolerance {request.tolerance:g} is for --compare: add it, or leave --tolerance out")
    if request.batch_size and request.batch_sizes:
        problems.append("--batch-size and --batch-sizes are both given: give one of them")
    if request.zero_levels and num_ranks == 1:
        problems.append("--zero-levels is for several GPUs: add --gpus N, or leave it out")
    if request.memcpy_all_gather is not None and (num_ranks == 1 or where.kind == "cpu"):
        problems.append("--memcpy-all-gather is for several GPUs: add --gpus N, or leave it out")
    problems += _odd_tokens(request, where, num_ranks)
    found = []
    for name, config in configs.items():
        for dtype in dtypes if not unknown_dtypes else ():
            try:
                one = _wanted(request, name, config, dtype, where, with_fp8="e4m3" in dtypes)
                found += [replace(one, batch_size=size) for size in request.batch_sizes or (request.batch_size,)]
            except LlmqError as error:
                problems.append(str(error))
    problems = list(dict.fromkeys(problems))  # a problem of every model is shown once
    if problems:
        raise UsageError("\n  ".join(["options that need a change:", *problems]) if problems[1:] else problems[0])
    return found


def _default_dtypes(request: BenchRequest, where: Device) -> tuple[str, ...]:
    if where.kind == "cpu":
        return ("bf16",) if request.models else ("fp32",)
    return ("bf16", "e4m3") if devices.has_fp8(where) and not request.models else ("bf16",)


def _odd_tokens(request: BenchRequest, where: Device, num_ranks: int) -> Iterator[str]:
    """A message if --tokens-per-step is not a whole number of micro-batches of all ranks."""
    tokens, sequence = request.tokens_per_step, seq_len_of(request, where)
    if tokens is None:
        return
    for size in request.batch_sizes or (request.batch_size,):
        micro = (size or 1) * sequence * num_ranks
        if not tokens % micro:
            continue
        near = max(1, tokens // micro) * micro
        what = f"micro-batches of {size} x {sequence}" if size else f"{sequence}, --seq-len"
        what += f", on {num_ranks} GPUs" if num_ranks > 1 else ""
        yield f"--tokens-per-step {tokens} is not a multiple of {what}: use {near}"


def seq_len_of(request: BenchRequest, where: Device) -> int:
    """Tokens of a sequence."""
    return request.seq_len or DEFAULTS[where.kind].seq_len


def _wanted(
    request: BenchRequest, model: str, config: ModelConfig, dtype: str, where: Device, *, with_fp8: bool
) -> Wanted:
    """A configuration. Options of fp8 apply to e4m3 only, if that is among the dtypes."""
    left_out = OF_FP8 if with_fp8 and dtype != "e4m3" else ()
    own = MATMULS[dtype]
    if "lora_rank" in request.recipe:
        own = {key: value for key, value in own.items() if key not in MOMENTS}
    flat = {
        "model": model,
        "from_scratch": True,
        "train_file": "generated",
        "seq_len": seq_len_of(request, where),
        **{f"recompute_{name}": True for name in request.recompute},
        **own,
        **{key: value for key, value in request.recipe.items() if key not in left_out},
    }
    options = Options.parse(flat)
    resolved = precision.resolve(options.precision, config)
    adapters.resolve(options.adapters, config)  # for its errors, before anything is measured
    devices.refuse_dtypes(where, resolved.matmul, resolved.head, scaling=resolved.scaling, option="--dtypes")
    return Wanted(model, dtype, config, resolved, flat)


def multiplied(dtypes: Precision) -> tuple[str, ...]:
    """Dtypes of the matrix products of a run; attention's are the model's."""
    return dtypes.matmul, dtypes.head, dtypes.model


def _check_place(path: Path) -> None:
    """StorageError before anything is measured, if the file cannot be written."""
    folder = path.absolute().parent
    place = path if path.exists() else folder
    if path.is_dir() or not folder.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {folder}"
    elif not os.access(place, os.W_OK):
        why = f"{place} is read-only for this user"
    else:
        return
    raise StorageError(f"--save {path} cannot be written: {why}: name a file in a folder that can be written to")


def measured(
    request: BenchRequest, wanted: Sequence[Wanted], where: Device, peaks: Mapping[str, float], ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """The result of each configuration; without --models, of those that fit and can be measured in time."""
    defaults, began, done = DEFAULTS[where.kind], time.perf_counter(), 0
    share = defaults.share
    for one in wanted:
        backend = open_backend(where.kind, deterministic=request.deterministic)
        try:
            plan = fitting_plan(request, one, where, backend)
        except MemoryLimitError:
            if (request.models and not request.batch_sizes) or (one is wanted[-1] and not done):
                raise
            continue
        tokens = request.tokens_per_step or whole(defaults.tokens, plan)
        if not request.models:
            spec = plan.spec
            light = sol.seconds_per_token(spec.config, spec.seq_len, peaks, spec.precision.dtype, spec.adapters)
            left = LIMIT_S - (time.perf_counter() - began)
            in_time = tokens_in_time(tokens, plan, request.steps + request.warmup, light / share, left)
            if in_time is None and done:
                continue
            tokens = request.tokens_per_step or in_time or whole(1, plan)
        limit_s = math.inf if request.models else LIMIT_S - LADDER_S - (time.perf_counter() - began)
        result = _measure(request, one, plan, backend, where, tokens, peaks, ceilings, limit_s)
        share, done = CAUTION * result["sol"], done + 1
        yield result
        del backend
        gc.collect()  # the next configuration needs the memory


def fitting_plan(
    request: BenchRequest, one: Wanted, where: Device, backend: Backend, sharding: Sharding = UNSHARED
) -> Plan:
    """The plan with the batch that was asked for, or the largest that fits. MemoryLimitError if none does.

    Automatic chunks of the attention backward rise where the batch cannot get smaller.
    """
    on_gpu, (total_bytes, free_bytes) = where.kind == "cuda", devices.memory_bytes(where)
    gpu_bytes = total_bytes if on_gpu else 0
    most = DEFAULTS[where.kind].batch_size
    sizes = [one.batch_size] if one.batch_size else [most >> shift for shift in range(most.bit_length())]
    modelled = open_backend("planned", deterministic=request.deterministic) if on_gpu else backend
    fitting = (
        size for size in sizes if _plan(one, size, modelled, gpu_bytes, sharding).total_bytes <= ROOM * free_bytes
    )
    plan = _plan(one, next(fitting, sizes[-1]), backend, gpu_bytes, sharding)
    while plan.total_bytes > free_bytes and not one.batch_size and plan.spec.batch_size > 1:
        plan = _plan(one, plan.spec.batch_size // 2, backend, gpu_bytes, sharding)
    if memory.chooses_attention_chunks(Options.parse(one.flat).memory):
        plan = with_fitting_chunks(plan, free_bytes, backend.scratch_bytes)
    relaxed = open_backend("planned", deterministic=False).scratch_bytes if on_gpu and request.deterministic else None
    refuse_if_too_large(plan, free_bytes, backend.scratch_bytes, relaxed)
    return plan


def _plan(one: Wanted, batch_size: int, backend: Backend, gpu_bytes: int, sharding: Sharding) -> Plan:
    options = Options.parse({**one.flat, "batch_size": batch_size})
    sizes = {"batch_size": batch_size, "seq_len": one.flat["seq_len"]}
    logit_bytes = padded_vocab(one.config) * DTYPES[one.precision.model].itemsize
    sized = {**sizes, "logit_bytes": logit_bytes, "gpu_bytes": gpu_bytes}
    limits = memory.resolve(options.memory, own_master=one.precision.has_own_master, **sized)
    low_rank = adapters.resolve(options.adapters, one.config)
    hyper = Hyperparameters(clips_by_last=limits.fused)
    spec = Spec(one.config, one.precision, limits, hyper, **sizes, sharding=sharding, adapters=low_rank)
    return make_plan(spec, backend.scratch_bytes)


def whole(tokens: int, plan: Plan) -> int:
    """The most tokens of whole micro-batches up to `tokens`, and at least one."""
    micro = plan.spec.batch_size * plan.spec.seq_len
    return max(tokens // micro, 1) * micro


def tokens_in_time(tokens: int, plan: Plan, count: int, seconds_per_token: float, left_s: float) -> int | None:
    """`tokens`, halved until `count` steps of them end within `left_s`; None if one micro-batch takes longer."""
    micro = plan.spec.batch_size * plan.spec.seq_len
    while START_S + count * tokens * seconds_per_token > left_s:
        if tokens <= micro:
            return None
        tokens = whole(tokens // 2, plan)
    return tokens


def _measure(
    request: BenchRequest,
    one: Wanted,
    plan: Plan,
    backend: Backend,
    where: Device,
    tokens_per_step: int,
    peaks: Mapping[str, float],
    ceilings: Ceilings,
    limit_s: float,
) -> dict[str, Any]:
    uuid = where.gpu.uuid if where.gpu else None
    clock = CudaClock() if where.kind == "cuda" else Clock()
    screen = Screen(sys.stderr)
    with screen.task(f"Timing the matrix products of {one.name}") as report:
        make_ready(plan, backend, report)
    with screen.task(f"Measuring {one.name}") as report:
        speed = measure_plan(
            plan,
            backend,
            clock,
            tokens_per_step=tokens_per_step,
            steps=request.steps,
            warmup=request.warmup,
            uuid=uuid,
            limit_s=limit_s,
            report=report,
            say=screen.line,
        )
    others = other_processes(where)
    deterministic = request.deterministic or where.kind == "cpu"
    return result_of(one.model, one.dtype, speed, ladder(speed, ceilings), peaks, others, deterministic=deterministic)
