"""Configurations on several GPUs: one alone, then all at every level that is asked for, with what communication costs.

Every rank makes the same measurements in the same order. What depends on time or on free memory is agreed: a collective
that one rank does not make would never end.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmq.bench.ceilings import Machine
from llmq.bench.communication import EchoWorld, layer_rates
from llmq.bench.configuration import DEFAULTS, Configuration, clock_of, fitting_plan, measured_alone, timed
from llmq.bench.ladder import COMPUTING, Ladder, Rung, computing_roofline_ms
from llmq.bench.results import result_of
from llmq.comm.world import World
from llmq.engine.measure import BATCHES, Speed, zipf_batch
from llmq.errors import MemoryLimitError
from llmq.options.bench import BenchOptions
from llmq.plan.plan import Plan

EXPOSED = "communication, exposed"  # a rung of the ladder of several GPUs, beside this one
ALONE = -1  # the plan of a GPU that shares nothing, among those by level


def by_ranks(
    request: BenchOptions, wanted: Sequence[Configuration], machine: Machine, world: World
) -> Iterator[dict[str, Any]]:
    """The results of each configuration; those of one GPU on the first rank alone.

    MemoryLimitError on all ranks if one has too little memory at a level; what does not fit on one GPU is left out.
    """
    for one in wanted:
        plans = _agreed_plans(request, one, world)
        spec = next(iter(plans.values())).spec
        micro = spec.batch_size * spec.seq_len * world.size
        tokens = request.tokens_per_step or max(DEFAULTS[machine.where.kind].tokens // micro, 1) * micro
        rate = None
        if ALONE in plans and world.rank == 0:
            found = measured_alone(request, one, plans[ALONE], machine, tokens)
            yield found
            rate = found["tokens_per_second"]["median"]
            gc.collect()  # the next plan needs the memory
        rate = world.gather(rate)[0]  # the others wait for the first
        for level in request.zero_levels:
            yield _at_level(request, one, plans[level], level, machine, world, tokens, rate)


def _at_level(
    request: BenchOptions,
    one: Configuration,
    plan: Plan,
    level: int,
    machine: Machine,
    world: World,
    tokens: int,
    one_gpu: float | None,
) -> dict[str, Any]:
    """The result of all GPUs at a level; `one_gpu` is the rate of one alone, if the model fits there."""
    name, size = f"{one.name} on {world.size} GPUs, level {level}", world.size
    about = (request, one, plan, machine, world, tokens, name)
    speed, rates = _steps(*about, talks_in=world, title="Measuring")
    echo, _ = _steps(*about, talks_in=EchoWorld(world.rank, size), title="Leaving out communication of")
    step_ms, echo_ms = (1e3 * statistics.median(each.seconds) for each in (speed, echo))
    whole = replace(speed, tokens_per_step=tokens)
    computing = speed.micro_batch_ms * echo_ms / step_ms
    roofline = computing_roofline_ms(plan, speed.tokens_per_step, machine.ceilings)
    rungs = (
        Rung(COMPUTING, 0, computing, roofline, 0.0, 0.0),
        Rung(EXPOSED, 0, speed.micro_batch_ms - computing, 0.0, 0.0, 0.0),
    )
    communication = {
        "exposed_ms": step_ms - echo_ms,
        "exposed_share": 1 - echo_ms / step_ms,
        "scaling": whole.tokens_per_second[0] / one_gpu if one_gpu else None,
        **{f"{what}_bytes_per_s": rate for what, rate in rates.items()},
    }
    found = Ladder(rungs, speed.micro_batch_ms)
    return result_of(
        *(one.model, one.dtype, whole, found, machine, one.is_deterministic),
        gpus=size,
        zero_level=level,
        communication=communication,
    )


def _steps(
    request: BenchOptions,
    one: Configuration,
    plan: Plan,
    machine: Machine,
    world: World,
    tokens: int,
    name: str,
    *,
    talks_in: World,
    title: str,
) -> tuple[Speed, Mapping[str, float | None]]:
    """Steps of all ranks, each as long as on the slowest; and but for echoes, the slowest rates of a layer."""
    backend, spec = one.open_backend(world=talks_in), plan.spec
    seeds = range(spec.seed + BATCHES * world.rank, spec.seed + BATCHES * (world.rank + 1))
    batches = [zipf_batch(spec.config.vocab_size, spec.batch_size, spec.seq_len, seed) for seed in seeds]
    speed = timed(
        *(request, plan, backend, machine.where, tokens // world.size, name),
        title=title,
        world=world,
        batches=batches,
        single_ops=False,
    )
    gc.collect()  # before any rank takes memory again: others may have this one's open
    slowest = tuple(map(max, zip(*world.gather(list(speed.seconds)), strict=True)))
    rates: Mapping[str, float | None] = {}
    if talks_in is world:
        every = world.gather(layer_rates(plan, backend, clock_of(machine.where)))
        rates = {what: None if rate is None else min(each[what] for each in every) for what, rate in every[0].items()}
    del backend
    gc.collect()
    return replace(speed, seconds=slowest), rates


def _agreed_plans(request: BenchOptions, one: Configuration, world: World) -> dict[int, Plan]:
    """Plans by level, all with the batch that fits every rank at every level, and one GPU if the model does."""
    levels = (ALONE, *request.zero_levels)
    if one.batch_size is None:
        plans = [_fitting(request, one, level, world)[0] for level in levels]
        fits = [plan.spec.batch_size for plan in plans if plan is not None]
        sizes = [size for size in world.gather(min(fits, default=0)) if size]
        one = replace(one, batch_size=min(sizes, default=1))
    found = {}
    for level in levels:
        plan, problem = _fitting(request, one, level, world)
        problem = next(filter(None, world.gather(problem)), None)
        if problem is not None and level != ALONE:
            raise MemoryLimitError(f"--zero-levels {level} on {world.size} GPUs: {problem}")
        if plan is not None and problem is None:
            found[level] = plan
    return found


def _fitting(request: BenchOptions, one: Configuration, level: int, world: World) -> tuple[Plan | None, str | None]:
    """The plan of this rank at a level, or why there is none."""
    shared = one if level == ALONE else one.on_ranks(world.rank, world.size, level)
    try:
        return fitting_plan(request, shared, one.open_backend()), None
    except MemoryLimitError as error:
        return None, str(error)
