"""The runs of `llmq-bench`: each configuration planned, measured, and shown beside what is predicted.

With `--gpus N` it starts a process for each GPU, each with the arguments of the command.
Without `--models` the device decides: models that fit its memory, in bf16 and in fp8 where the card has it,
in steps of fewer tokens, as many as can be measured in time. A measurement that takes longer is cut short.

Of several GPUs every rank makes the same measurements in the same order. What depends on time or on free memory is
agreed: a collective that one rank does not make would never end.
"""

import gc
import math
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from llmq.backends import Backend
from llmq.bench.configuration import DEFAULTS, Configuration, configurations, multiplied, shared
from llmq.bench.ladder import Machine, ladder, look_at
from llmq.bench.results import document, result_of, save, show, show_all, show_machine
from llmq.comm.environment import Place, gpu_index, recognised
from llmq.comm.launch import Group, run_group
from llmq.comm.world import ALONE, World, copied_in_words, join_world
from llmq.engine.bound_plan import make_ready
from llmq.engine.measure import BATCHES, Speed, measure_plan, zipf_batch
from llmq.errors import MemoryLimitError, UsageError
from llmq.hardware import device
from llmq.hardware.cores import cores_of_ranks, use_blas_threads
from llmq.hardware.device import Device
from llmq.options.commands import BenchOptions
from llmq.plan import levels
from llmq.plan.plan import Plan
from llmq.screen import Report, Screen, unreported

PROGRAM = "llmq.cli.start:bench"  # what every rank runs
DEFAULT_LEVEL = 1  # of several GPUs
LIMIT_S = 165.0  # for all configurations that were chosen here: under three minutes with the start of Python
LADDER_S = 10.0  # of them: single ops, after the steps
START_S = 30.0  # at least, of a configuration: kernels, algorithms, weights, ladder
FEW = 65_536  # tokens of a step of what was chosen here
UNSHARED = -1  # the plan of a GPU that shares nothing, among those by level


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
    configurations(request, training, device.pick_device(shared(training).system), num)
    with TemporaryDirectory(prefix="llmq-bench-") as logs:
        first = Place(0, num, 0, num, "127.0.0.1", 0, secrets.token_hex(16), "--gpus")
        return run_group(Group((PROGRAM, *arguments), first, Path(logs), cores_of_ranks(num, addresses)))


def run(request: BenchOptions, training: Mapping[str, Any], command: str) -> None:
    """Measures, prints and saves, with the `command` and its options of llmq-train.

    Of many ranks each measures, and the first one prints and saves.
    """
    common, place = shared(training), recognised(os.environ, request.gpus)
    where = device.pick_device(common.system)
    if place is None or place.size == 1:
        run_on(request, training, command, where, ALONE)
        return
    where = device.use(where, partial(gpu_index, place))
    world = join_world(place, where, levels.copying(common.sharding))
    try:
        run_on(request, training, command, where, world)
    finally:
        world.close()


def run_on(request: BenchOptions, training: Mapping[str, Any], command: str, where: Device, world: World) -> None:
    """The same on a device, as one of the ranks of a world."""
    if where.kind == "cpu":
        use_blas_threads()
    if world.size > 1:
        request = request.model_copy(update={"zero_levels": request.zero_levels or (DEFAULT_LEVEL,)})
    wanted = configurations(request, training, where, world.size)
    console = Console(quiet=world.rank > 0)
    machine = look_at(where, multiplied(wanted), world)
    show_machine(console, machine)
    if copied := copied_in_words(world):
        console.print(copied)
    results = []
    for result in measured(request, wanted, machine) if world.size == 1 else by_ranks(wanted, machine, world):
        results.append(result)
        show(console, result)
    if len(wanted) > 1 and request.models:
        show_all(console, results, [one.name for one in wanted])
    if request.save and world.rank == 0:
        save(Path(request.save), document(results, command, machine))


def measured(request: BenchOptions, wanted: Sequence[Configuration], machine: Machine) -> Iterator[dict[str, Any]]:
    """The result of each configuration; without --models, of those that fit and can be measured in time."""
    defaults, began, done = DEFAULTS[machine.where.kind], time.perf_counter(), 0
    for one in wanted:
        backend = one.open_backend()
        try:
            plan = one.fitting_plan(backend)
        except MemoryLimitError:
            if (request.models and len(request.batch_size) < 2) or (one is wanted[-1] and not done):
                raise
            continue
        few = defaults.tokens if request.models else min(defaults.tokens, FEW)
        left_s = math.inf if request.models else LIMIT_S - (time.perf_counter() - began)
        if done and left_s < START_S:
            continue
        tokens = request.tokens_per_step or whole(few, plan)
        result = measured_alone(one, plan, machine, tokens, backend, left_s - LADDER_S)
        done += 1
        yield result
        del backend
        gc.collect()  # the next configuration needs the memory


def whole(tokens: int, plan: Plan, num_ranks: int = 1) -> int:
    """The most tokens of whole micro-batches of all ranks up to `tokens`, and at least one of each."""
    micro = plan.spec.batch_size * plan.spec.seq_len * num_ranks
    return max(tokens // micro, 1) * micro


def measured_alone(
    one: Configuration, plan: Plan, machine: Machine, tokens: int, backend: Backend, limit_s: float = math.inf
) -> dict[str, Any]:
    """The result of one GPU, or of the CPU, in steps of `tokens`."""
    speed = timed(one, plan, backend, tokens, one.name, single_ops=one.request.single_ops, limit_s=limit_s)
    return result_of(one, speed, ladder(speed, machine.ceilings), machine)


def timed(
    one: Configuration, plan: Plan, backend: Backend, tokens: int, name: str, *, world: World = ALONE, **settings: Any
) -> Speed:
    """Times steps of `tokens` on this rank; the first rank shows bars. `settings` are those of `measure_plan`."""
    screen = Screen(sys.stderr)

    def task(what: str) -> AbstractContextManager[Report]:
        return screen.task(what) if world.rank == 0 else nullcontext(unreported)

    with task(f"Timing the matrix products of {name}") as report:
        make_ready(plan, backend, report)
    world.gather(None)  # no rank times its steps while another one still times products
    with task(f"Measuring {name}") as report:
        return measure_plan(
            *(plan, backend, one.clock()),
            tokens_per_step=tokens,
            steps=one.request.steps,
            warmup=one.request.warmup,
            uuid=one.where.gpu.uuid if one.where.gpu else None,
            report=report,
            say=screen.line if world.rank == 0 else lambda line: None,
            **settings,
        )


def by_ranks(wanted: Sequence[Configuration], machine: Machine, world: World) -> Iterator[dict[str, Any]]:
    """The results of each configuration: of one GPU, on the first rank alone, then of all at every level.

    MemoryLimitError on all ranks if one has too little memory at a level; what does not fit on one GPU is left out.
    """
    for one in wanted:
        plans = _agreed_plans(one, world)
        tokens = one.request.tokens_per_step or whole(one.defaults.tokens, next(iter(plans.values())), world.size)
        rate = None
        if UNSHARED in plans and world.rank == 0:
            found = measured_alone(one, plans[UNSHARED], machine, tokens, one.open_backend())
            yield found
            rate = found["tokens_per_second"]["median"]
            gc.collect()  # the next plan needs the memory
        rate = world.gather(rate)[0]  # the others wait for the first
        for level in one.request.zero_levels:
            yield _at_level(one, plans[level], level, machine, world, tokens, rate)


def _at_level(
    one: Configuration, plan: Plan, level: int, machine: Machine, world: World, tokens: int, one_gpu: float | None
) -> dict[str, Any]:
    """The result of all GPUs at a level, each step as long as on the slowest; `one_gpu` is the rate of one alone, if
    the model fits there."""
    backend, spec = one.open_backend(world=world), plan.spec
    seeds = range(spec.seed + BATCHES * world.rank, spec.seed + BATCHES * (world.rank + 1))
    batches = [zipf_batch(spec.config.vocab_size, spec.batch_size, spec.seq_len, seed) for seed in seeds]
    name = f"{one.name} on {world.size} GPUs, level {level}"
    speed = timed(one, plan, backend, tokens // world.size, name, world=world, batches=batches, single_ops=False)
    del backend
    gc.collect()  # before any rank takes memory again: others may have this one's open
    speed = replace(speed, seconds=tuple(map(max, zip(*world.gather(list(speed.seconds)), strict=True))))
    of_all, found = replace(speed, tokens_per_step=tokens), ladder(speed, machine.ceilings)
    scaling = of_all.tokens_per_second[0] / one_gpu if one_gpu else None
    shared = {"gpus": world.size, "zero_level": level, "scaling": scaling}
    return {**result_of(one, of_all, found, machine, num_gpus=world.size), **shared}


def _agreed_plans(one: Configuration, world: World) -> dict[int, Plan]:
    """Plans by level, all with the batch that fits every rank at every level, and one GPU if the model does."""
    levels = (UNSHARED, *one.request.zero_levels)
    if one.batch_size is None:
        plans = [_fitting(one, level, world)[0] for level in levels]
        fits = [plan.spec.batch_size for plan in plans if plan is not None]
        sizes = [size for size in world.gather(min(fits, default=0)) if size]
        one = replace(one, batch_size=min(sizes, default=1))
    found = {}
    for level in levels:
        plan, problem = _fitting(one, level, world)
        problem = next(filter(None, world.gather(problem)), None)
        if problem is not None and level != UNSHARED:
            raise MemoryLimitError(f"--zero-levels {level} on {world.size} GPUs: {problem}")
        if plan is not None and problem is None:
            found[level] = plan
    return found


def _fitting(one: Configuration, level: int, world: World) -> tuple[Plan | None, str | None]:
    """The plan of this rank at a level, or why there is none."""
    shared = one if level == UNSHARED else one.on_ranks(world.rank, world.size, level)
    try:
        return shared.fitting_plan(one.open_backend()), None
    except MemoryLimitError as error:
        return None, str(error)
