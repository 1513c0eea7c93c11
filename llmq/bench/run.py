"""The runs of `llmq-bench`: each configuration planned, measured, and shown beside what is predicted.

With `--gpus N` it starts a process for each GPU, each with the arguments of the command.
Without `--models` the device decides: models that fit its memory, in bf16 and in fp8 where the card has it,
as many as can be measured within LIMIT_S at the speed of those before. A measurement that takes longer is cut short.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from llmq.bench import table
from llmq.bench.ceilings import Machine, look_at
from llmq.bench.configuration import DEFAULTS, Configuration, fitting_plan, measured_alone
from llmq.bench.ranks import by_ranks
from llmq.bench.request import DEFAULT_LEVEL, check, shared
from llmq.bench.results import Change, compare, document, save
from llmq.comm.environment import Place, gpu_index, recognised
from llmq.comm.join import copied_in_words, drawn_token, join_world
from llmq.comm.launch import Group, run_group
from llmq.comm.world import ALONE, World
from llmq.errors import MemoryLimitError, UsageError
from llmq.hardware import device
from llmq.hardware.cores import cores_of_ranks, use_blas_threads
from llmq.hardware.device import Device
from llmq.options.bench import BenchOptions
from llmq.plan import sharding
from llmq.plan.plan import Plan

PROGRAM = "llmq.cli.start:bench"  # what every rank runs
LIMIT_S = 165.0  # for all configurations that were chosen here: under three minutes with the start of Python
LADDER_S = 10.0  # of them: single ops, after the steps
START_S = 15.0  # of a configuration: kernels, algorithms, weights, ladder
CAUTION = 0.8  # of the last share of the speed of light is expected of the next


def started(request: BenchOptions, training: Mapping[str, Any], arguments: Sequence[str]) -> int | None:
    """The exit code of the processes that `--gpus` starts; None if this process is to measure.

    What can be refused is refused here, once. UsageError also for GPUs that are not there.
    """
    if request.gpus == 1 or recognised(os.environ, request.gpus) is not None:
        return None
    if training.get("device") == "cpu":
        raise UsageError(f"--gpus {request.gpus} counts GPUs, but --device is cpu: leave one of them out")
    addresses = device.gpu_addresses(request.gpus)
    num = len(addresses)
    if num == 1:
        return None
    check(request, training, device.pick_device(shared(training).system), num)
    with TemporaryDirectory(prefix="llmq-bench-") as logs:
        first = Place(0, num, 0, num, "127.0.0.1", 0, drawn_token(), "--gpus")
        return run_group(Group((PROGRAM, *arguments), first, Path(logs), cores_of_ranks(num, addresses)))


def run(request: BenchOptions, training: Mapping[str, Any], command: str) -> int:
    """Measures, prints and saves, with the `command` and its options of llmq-train; returns the exit code: 1 for a
    regression beyond the tolerance.

    Of many ranks each measures, and the first one prints and saves.
    """
    common, place = shared(training), recognised(os.environ, request.gpus)
    where = device.pick_device(common.system)
    if place is None or place.size == 1:
        return run_on(request, training, command, where, ALONE)
    where = device.use(where, partial(gpu_index, place))
    world = join_world(place, where, sharding.copying(common.sharding))
    try:
        return run_on(request, training, command, where, world)
    finally:
        world.close()


def run_on(request: BenchOptions, training: Mapping[str, Any], command: str, where: Device, world: World) -> int:
    """The same on a device, as one of the ranks of a world."""
    if where.kind == "cpu":
        use_blas_threads()
    if world.size > 1:
        request = request.model_copy(update={"zero_levels": request.zero_levels or (DEFAULT_LEVEL,)})
    wanted, old = check(request, training, where, world.size)
    is_first = world.rank == 0
    console = Console(stderr=request.markdown, quiet=not is_first)  # with --markdown only that goes to stdout
    machine = look_at(where, {dtype for one in wanted for dtype in one.multiplied}, world)
    table.show_machine(console, machine.facts())
    if copied := copied_in_words(world):
        console.print(copied)
    results = []
    found = measured(request, wanted, machine) if world.size == 1 else by_ranks(request, wanted, machine, world)
    for result in found:
        results.append(result)
        if not request.batch_sizes:
            table.show(console, result)
    if request.batch_sizes:
        table.show_sizes(console, results, [one.name for one in wanted])
    table.show_ranks(console, results)
    content = document(results, command, machine)
    if not is_first:
        return 0
    if request.save:
        save(Path(request.save), content)
    if request.markdown:
        print(table.markdown(content))
    if old is None:
        return 0
    changes, lone = compare(old, content)
    table.show_changes(console, str(request.compare), changes, lone)
    return _exit_code(console, changes, request.tolerance)


def _exit_code(console: Console, changes: Sequence[Change], tolerance: float | None) -> int:
    if tolerance is None:
        return 0
    slower = [change.name for change in changes if change.percent < -tolerance]
    if slower:
        console.print(f"Slower by more than {tolerance:g}%: {', '.join(slower)}", highlight=False)
    return 1 if slower else 0


def measured(request: BenchOptions, wanted: Sequence[Configuration], machine: Machine) -> Iterator[dict[str, Any]]:
    """The result of each configuration; without --models, of those that fit and can be measured in time."""
    defaults, began, done = DEFAULTS[machine.where.kind], time.perf_counter(), 0
    share = defaults.share
    for one in wanted:
        backend = one.open_backend()
        try:
            plan = fitting_plan(request, one, backend)
        except MemoryLimitError:
            if (request.models and not request.batch_sizes) or (one is wanted[-1] and not done):
                raise
            continue
        tokens, limit_s = request.tokens_per_step or whole(defaults.tokens, plan), math.inf
        if not request.models:
            light = plan.spec.light_s(machine.peaks)
            left = LIMIT_S - (time.perf_counter() - began)
            in_time = tokens_in_time(tokens, plan, request.steps + request.warmup, light / share, left)
            if in_time is None and done:
                continue
            tokens = request.tokens_per_step or in_time or whole(1, plan)
            limit_s = LIMIT_S - LADDER_S - (time.perf_counter() - began)
        result = measured_alone(request, one, plan, machine, tokens, backend, limit_s)
        share, done = CAUTION * result["sol"], done + 1
        yield result
        del backend
        gc.collect()  # the next configuration needs the memory


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
