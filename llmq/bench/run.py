"""The runs of `llmq-bench`: each configuration planned, measured, and shown beside what is predicted.

Without `--models` the device decides: models that fit its memory, in bf16 and in fp8 where the card has it,
as many as can be measured within LIMIT_S at the speed of those before. A measurement that takes longer is cut short.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from rich.console import Console

from llmq.adapters import resolve as adapters
from llmq.adapters.lora import Lora
from llmq.adapters.several import alike
from llmq.backends import Backend, open_backend
from llmq.bench import table as bench_table
from llmq.bench.ceilings import Ceilings, measure_ceilings
from llmq.bench.ladder import ladder
from llmq.bench.ranks import RankBench, other_processes
from llmq.bench.request import DEFAULT_LEVEL, DEFAULTS, BenchRequest, Wanted, check, multiplied
from llmq.bench.results import Change, compare, document, result_of, save
from llmq.comm.join import copied_in_words, join_world
from llmq.comm.launch import gpu_index, recognised
from llmq.comm.peer_copies import Copying
from llmq.comm.world import ALONE, World
from llmq.data.batches.step import step_of
from llmq.engine.advice import Limits, refuse_if_too_large
from llmq.engine.bound_plan import make_ready
from llmq.engine.measure import Clock, CudaClock, measure_plan
from llmq.engine.predict import predicted_rate
from llmq.errors import MemoryLimitError
from llmq.hardware import blas
from llmq.hardware import device as devices
from llmq.hardware.device import Device
from llmq.model import optimizer
from llmq.model.parameters import padded_vocab
from llmq.options.parse import Options
from llmq.plan import memory, precision
from llmq.plan.plan import Plan, make_plan
from llmq.plan.remedies import with_fitting_chunks
from llmq.plan.spec import Spec
from llmq.screen import Screen
from llmq.stores.sharding import ALONE as UNSHARED
from llmq.stores.sharding import Sharding
from llmq.tensor import DTYPES
from llmq.training.fit import SEARCHING, fitted

ROOM = 0.95  # of the free memory, for a plan that models what cuDNN will need
LIMIT_S = 165.0  # for all configurations that were chosen here: under three minutes with the start of Python
LADDER_S = 10.0  # of them: single ops, after the steps
START_S = 15.0  # of a configuration: kernels, algorithms, weights, ladder
CAUTION = 0.8  # of the last share of the speed of light is expected of the next


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
            light = spec.light_s(peaks)
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
    """The plan with the batch that was asked for, or the largest that fits, or the one that --fit takes.
    MemoryLimitError if none fits.

    Automatic chunks of the attention backward rise where the batch cannot get smaller.
    """
    on_gpu, (total_bytes, free_bytes) = where.kind == "cuda", devices.memory_bytes(where)
    gpu_bytes = total_bytes if on_gpu else 0
    options = Options.parse(one.flat)
    if memory.is_to_fit(options.memory):
        plan = _chosen_plan(request, one, where, backend, gpu_bytes)
    else:
        most = DEFAULTS[where.kind].batch_size
        halves = [most >> shift for shift in range(most.bit_length())]
        sizes = [one.batch_size] if one.batch_size else [n for n in halves if n % one.at_once == 0] or [one.at_once]
        modelled = open_backend("planned", deterministic=request.deterministic) if on_gpu else backend
        fitting = (
            size for size in sizes if _plan(one, size, modelled, gpu_bytes, sharding).total_bytes <= ROOM * free_bytes
        )
        plan = _plan(one, next(fitting, sizes[-1]), backend, gpu_bytes, sharding)
        while plan.total_bytes > free_bytes and not one.batch_size and plan.spec.batch_size % (2 * one.at_once) == 0:
            plan = _plan(one, plan.spec.batch_size // 2, backend, gpu_bytes, sharding)
    if memory.chooses_attention_chunks(options.memory):
        plan = with_fitting_chunks(plan, free_bytes, backend.scratch_bytes)
    relaxed = open_backend("planned", deterministic=False).scratch_bytes if on_gpu and request.deterministic else None
    host_bytes = devices.host_bytes(options.system, where)
    room = Limits(free_bytes, backend.scratch_bytes, relaxed, host_bytes, in_one=not on_gpu, card=where.card)
    refuse_if_too_large(plan, room)
    return plan


def _chosen_plan(request: BenchRequest, one: Wanted, where: Device, backend: Backend, gpu_bytes: int) -> Plan:
    """The plan that --fit takes for steps of so many tokens, said on stderr."""
    samples = max((request.tokens_per_step or DEFAULTS[where.kind].tokens) // one.flat["seq_len"], 1)
    options = Options.parse({**one.flat, "batch_size": 1, "grad_accumulation": samples})

    def spec_of(tried: Options) -> Spec:
        return _spec(one, tried, gpu_bytes, UNSHARED)

    modelled = open_backend("planned", deterministic=request.deterministic)
    screen = Screen(sys.stderr)
    with screen.task(f"{SEARCHING}, of {one.name}") as report:
        scratch = (modelled.scratch_bytes, backend.scratch_bytes)
        found = fitted(options, spec_of, where, *scratch, samples, fixed=request.recipe, report=report)
    for line in found.lines:
        screen.line(line)
    assert found.plan is not None
    return found.plan


def _plan(one: Wanted, batch_size: int, backend: Backend, gpu_bytes: int, sharding: Sharding) -> Plan:
    options = Options.parse({**one.flat, "batch_size": batch_size, "grad_accumulation": 1})
    return make_plan(_spec(one, options, gpu_bytes, sharding), backend.scratch_bytes)


def _spec(one: Wanted, options: Options, gpu_bytes: int, sharding: Sharding) -> Spec:
    """A configuration with these options, one micro-batch of which is planned."""
    b, t, micro_steps = step_of(options.data, 1)
    dtypes = precision.resolve(options.precision, one.config)
    logit_bytes = padded_vocab(one.config) * DTYPES[dtypes.model].itemsize
    hyper = optimizer.resolve(options.optimizer)
    limits = memory.resolve(
        options.memory,
        hyper.rule,
        batch_size=b,
        seq_len=t,
        logit_bytes=logit_bytes,
        gpu_bytes=gpu_bytes,
        own_master=dtypes.has_own_master,
        micro_steps=micro_steps,
    )
    method = adapters.resolve(options.adapters, one.config)
    if one.at_once > 1 and isinstance(method, Lora):
        method = alike(method, one.at_once, b)
    hyper = replace(hyper, clips_by_last=limits.fused)
    return Spec(one.config, dtypes, limits, hyper, b, t, sharding=sharding, adapters=method)


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
            single_ops=request.single_ops,
            limit_s=limit_s,
            report=report,
            say=screen.line,
        )
    others = other_processes(where)
    return result_of(
        one.model,
        one.dtype,
        speed,
        ladder(speed, ceilings),
        peaks,
        others,
        deterministic=request.deterministic or where.kind == "cpu",
        predicted=predicted_rate(plan, where.card, tokens_per_step),
    )
