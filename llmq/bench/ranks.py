"""Configurations on several GPUs: one alone, then all at every level that is asked for, with what communication costs.

Every rank makes the same measurements in the same order. What depends on time or on free memory is agreed: a collective
that one rank does not make would never end.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmq.backends import Backend, open_backend
from llmq.bench.ceilings import Ceilings
from llmq.bench.communication import EchoWorld, layer_rates
from llmq.bench.ladder import COMPUTING, Ladder, Rung, computing_roofline_ms
from llmq.bench.results import result_of
from llmq.comm.world import World
from llmq.engine.bound_plan import make_ready
from llmq.engine.measure import BATCHES, Clock, CudaClock, Speed, measure_plan, zipf_batch
from llmq.engine.predict import predicted_rate
from llmq.errors import MemoryLimitError
from llmq.hardware import nvml
from llmq.hardware.device import Device
from llmq.plan.levels import at_level
from llmq.plan.plan import Plan
from llmq.screen import Report, Screen, unreported
from llmq.stores.sharding import Sharding

if TYPE_CHECKING:
    from llmq.bench.request import BenchRequest, Wanted

EXPOSED = "communication, exposed"  # a rung of the ladder of several GPUs, beside this one
ALONE = -1  # the plan of a GPU that shares nothing, among those by level


def other_processes(where: Device) -> int | None:
    """Processes on the GPU beside this one, which has a context there; None where that is not known."""
    processes = nvml.num_processes(where.gpu.uuid) if where.gpu else None
    return None if processes is None else max(processes - 1, 0)


@dataclass(frozen=True)
class RankBench:
    """The measurements of one rank.

    `plan` is the plan of a configuration that fits this rank, `alone` the result of one GPU in steps of so many tokens,
    `default_tokens` those of a step if the request does not say it.
    """

    request: BenchRequest
    where: Device
    world: World
    peaks: Mapping[str, float]
    ceilings: Ceilings
    plan: Callable[[Wanted, Backend, Sharding], Plan]
    alone: Callable[[Wanted, Plan, int], dict[str, Any]]
    default_tokens: int

    def measured(self, wanted: Sequence[Wanted]) -> Iterator[dict[str, Any]]:
        """The results of each configuration; those of one GPU on the first rank alone.

        MemoryLimitError on all ranks if one has too little memory at a level; what does not fit on one GPU is left out.
        """
        for one in wanted:
            plans = self._agreed_plans(one)
            tokens = self._tokens(next(iter(plans.values())))
            found = None
            if ALONE in plans and self.world.rank == 0:
                found = self.alone(one, plans[ALONE], tokens)
                yield found
                gc.collect()  # the next plan needs the memory
            rate = self._of_first(None if found is None else found["tokens_per_second"]["median"])
            for level in self.request.zero_levels:
                yield self._at_level(one, plans[level], level, tokens, rate)

    def _at_level(self, one: Wanted, plan: Plan, level: int, tokens: int, one_gpu: float | None) -> dict[str, Any]:
        """The result of all GPUs at a level."""
        size = self.world.size
        speed, rates = self._steps(one, plan, level, tokens, self.world, "Measuring")
        echo, _ = self._steps(
            one, plan, level, tokens, EchoWorld(self.world.rank, size), "Leaving out communication of"
        )
        step_ms, echo_ms = (1e3 * statistics.median(each.seconds) for each in (speed, echo))
        whole = replace(speed, tokens_per_step=tokens)
        part = speed.micro_batch_ms / step_ms
        computing = part * echo_ms
        roofline = computing_roofline_ms(plan, speed.tokens_per_step, self.ceilings)
        rungs = (
            Rung(COMPUTING, 0, computing, roofline, 0.0, 0.0),
            Rung(EXPOSED, 0, speed.micro_batch_ms - computing, 0.0, 0.0, 0.0),
        )
        communication = {
            "exposed_ms": step_ms - echo_ms,
            "exposed_share": 1 - echo_ms / step_ms,
            "scaling": whole.tokens_per_second[0] / one_gpu if one_gpu else None,
            **{f"{name}_bytes_per_s": rate for name, rate in rates.items()},
        }
        return result_of(
            one.model,
            one.dtype,
            whole,
            Ladder(rungs, speed.micro_batch_ms),
            self.peaks,
            other_processes(self.where),
            deterministic=self.request.deterministic or self.where.kind == "cpu",
            gpus=size,
            zero_level=level,
            communication=communication,
            predicted=predicted_rate(plan, self.where.card, tokens),
        )

    def _steps(
        self, one: Wanted, plan: Plan, level: int, tokens: int, talks_in: World, title: str
    ) -> tuple[Speed, dict[str, float | None]]:
        """Steps of all ranks, each as long as on the slowest; and but for echoes, the slowest rates of a layer."""
        name = f"{one.name} on {self.world.size} GPUs, level {level}"
        backend = open_backend(self.where.kind, world=talks_in, deterministic=self.request.deterministic)
        clock = CudaClock() if self.where.kind == "cuda" else Clock()
        with self._task(f"Timing the matrix products of {name}") as report:
            make_ready(plan, backend, report)
        self.world.gather(None)
        b, t, seed = plan.spec.batch_size, plan.spec.seq_len, plan.spec.seed + BATCHES * self.world.rank
        batches = [zipf_batch(plan.spec.config.vocab_size, b, t, seed + index) for index in range(BATCHES)]
        with self._task(f"{title} {name}") as report:
            speed = measure_plan(
                plan,
                backend,
                clock,
                tokens_per_step=tokens // self.world.size,
                steps=self.request.steps,
                warmup=self.request.warmup,
                batches=batches,
                uuid=self.where.gpu.uuid if self.where.gpu else None,
                single_ops=False,
                report=report,
            )
        gc.collect()  # before any rank takes memory again: others may have this one's open
        slowest = tuple(map(max, zip(*self.world.gather(list(speed.seconds)), strict=True)))
        rates: dict[str, float | None] = {}
        if talks_in is self.world:
            rates = self._least(layer_rates(plan, backend, clock))
        del backend
        gc.collect()
        return replace(speed, seconds=slowest), rates

    def _agreed_plans(self, one: Wanted) -> dict[int, Plan]:
        """Plans by level, all with the batch that fits every rank at every level, and one GPU if the model does."""
        levels = (ALONE, *self.request.zero_levels)
        if one.batch_size is None:
            found = [self._fitting(one, level) for level in levels]
            fits = [plan.spec.batch_size for plan, _ in found if plan is not None]
            sizes = [size for size in self.world.gather(min(fits, default=0)) if size]
            one = replace(one, batch_size=min(sizes, default=1))
        plans = {}
        for level in levels:
            plan, problem = self._fitting(one, level)
            problem = next(filter(None, self.world.gather(problem)), None)
            if problem is not None and level != ALONE:
                raise MemoryLimitError(f"--zero-levels {level} on {self.world.size} GPUs: {problem}")
            if plan is not None and problem is None:
                plans[level] = plan
        return plans

    def _fitting(self, one: Wanted, level: int) -> tuple[Plan | None, str | None]:
        """The plan of this rank at a level, or why there is none."""
        sharding = Sharding() if level == ALONE else at_level(Sharding(self.world.rank, self.world.size), level)
        backend = open_backend(self.where.kind, deterministic=self.request.deterministic)
        try:
            return self.plan(one, backend, sharding), None
        except MemoryLimitError as error:
            return None, str(error)

    def _tokens(self, plan: Plan) -> int:
        """Tokens of a step on all GPUs, in whole micro-batches of all of them."""
        micro = plan.spec.batch_size * plan.spec.seq_len * self.world.size
        return self.request.tokens_per_step or max(self.default_tokens // micro, 1) * micro

    def _of_first(self, value: float | None) -> float | None:
        """What the first rank has; the others wait for it."""
        found: float | None = self.world.gather(value)[0]
        return found

    def _least(self, rates: dict[str, float | None]) -> dict[str, float | None]:
        """The smallest of all ranks, each."""
        everyone = self.world.gather(rates)
        return {name: None if rate is None else min(one[name] for one in everyone) for name, rate in rates.items()}

    def _task(self, title: str) -> AbstractContextManager[Report]:
        """A bar of the first rank."""
        return Screen(sys.stderr).task(title) if self.world.rank == 0 else nullcontext(unreported)
