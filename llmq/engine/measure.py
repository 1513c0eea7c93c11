"""Training speed of a model shape on this device: the trainer's own programs on generated tokens, timed.

Tokens are drawn from a Zipf distribution, as words are, so that embedding and loss see realistic repetition. Weights
are random: zeros would draw less power and run faster than training does.

A step's time is from one moment of the device to the next (CUDA events; the host's clock on the CPU), with whatever
the host does between two steps. Single ops are timed afterwards, each between two events, queued after enough other
work that the host's pace does not show. The optimizer has a call for every row, norms and biases of some KiB, which
alone would be little but launch and event: all calls of such an op are timed as one graph, as training runs them.

`cold_calls` times calls with cold caches: in a graph, each after a sweep that overwrites the L2 cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from llmq.backends import Backend, Launch, Op, Run
from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine
from llmq.hardware.nvml import Background, Reading
from llmq.model.held import Repeated, Values
from llmq.ops.seam import record
from llmq.plan.plan import Plan, make_plan
from llmq.plan.spec import Spec
from llmq.row import Row
from llmq.screen import Report
from llmq.tensor import DTYPES

BLOCK = 1 << 20  # random values that fill all weights, over and over
ZIPF = 1.2
TIMED = ("middle", "update")  # programs: the micro-step that repeats, and the optimizer step
BATCHES = 8  # different micro-batches, in turn
REPEATS = 3  # of the timing of single ops
AHEAD_S = 0.2  # of other work before it: the host takes about 30 us to launch an op between two events
SWEPT_BYTES = 2**28  # more than any card's L2 cache
SLOW_S = 5.0  # what a part of the start may take without being mentioned
SAMPLE_S = 0.05  # from one reading of clock and power to the next

Parameters = Iterable[tuple[Row, Values]]


@dataclass(frozen=True)
class TimedCall:
    """One call of an op: its index among the steps of `program` ("middle" or "update"), and its milliseconds."""

    program: str
    index: int
    ms: float


@dataclass(frozen=True)
class Speed:
    """Measured steps: `seconds` of each, after the warm-up; all have `tokens_per_step` tokens."""

    plan: Plan
    tokens_per_step: int
    seconds: tuple[float, ...]
    first_step_s: float
    losses: tuple[float, ...]  # of every step, those of the warm-up first
    calls: tuple[TimedCall, ...]  # of one micro-step and one update
    readings: tuple[Reading, ...]  # of the GPU during the measured steps
    peak_bytes: int  # of the device's memory, by the backend's count

    @property
    def tokens_per_second(self) -> tuple[float, float, float]:
        """(median, smallest, largest) over the steps."""
        rates = [self.tokens_per_step / s for s in self.seconds]
        return statistics.median(rates), min(rates), max(rates)

    @property
    def micro_batch_ms(self) -> float:
        """Milliseconds of a micro-batch, with its share of the update, in the median step."""
        tokens = self.plan.spec.batch_size * self.plan.spec.seq_len
        return 1e3 * statistics.median(self.seconds) * tokens / self.tokens_per_step


def measure(spec: Spec, backend: Backend, clock: Clock, **run: Any) -> Speed:
    """Plans the training of a model and measures it; `run` as for `measure_plan`."""
    return measure_plan(make_plan(spec, backend.scratch_bytes), backend, clock, **run)


def measure_plan(
    plan: Plan,
    backend: Backend,
    clock: Clock,
    *,
    tokens_per_step: int,
    steps: int = 10,
    warmup: int = 3,
    learning_rate: float = 1e-5,
    batches: Sequence[Batch] | None = None,
    parameters: Parameters | None = None,
    uuid: str | None = None,
    single_ops: bool = True,
    limit_s: float = math.inf,
    report: Report = lambda done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> Speed:
    """Trains for `warmup` + `steps` optimizer steps, or fewer within `limit_s`, then times single ops if wanted.

    `batches` (taken in turn) and `parameters` are generated if they are not given; `uuid` names a GPU whose clock and
    power are read meanwhile. `report` gets the steps that are done, between two that are timed. `say` gets a line for
    each part of the start that took long.
    """
    began = time.perf_counter()
    b, t = plan.spec.batch_size, plan.spec.seq_len
    engine = Engine(plan, backend)
    if backend.allocated:
        say(backend.allocated)
    with _timed("Weights and states set", say):
        engine.load(random_parameters(plan, plan.spec.seed) if parameters is None else parameters)
    accumulation = max(1, tokens_per_step // (b * t))
    if batches is None:
        different = min(accumulation, BATCHES)
        batches = [zipf_batch(plan.spec.config.vocab_size, b, t, plan.spec.seed + i) for i in range(different)]
    with _timed("fp8 scales found by passes without an update", say):
        engine.warm_up(batches[0])
    clock.follow(backend)
    marks: list[tuple[Any, Any]] = []  # before and after each step that counts
    losses, watch, first_step = [], None, 0.0
    try:
        least = warmup if clock.is_queued else min(warmup, 1)  # a GPU captures its graphs in the warm-up
        for step, counts in enumerate(paced(warmup, steps, least=least, end=began + limit_s), 1):
            if counts and not marks:
                watch = Background(uuid, every_s=SAMPLE_S) if uuid is not None else None
            start = clock.mark() if counts else None
            engine.start_step(step, learning_rate)
            for micro_step in range(accumulation):
                batch = batches[((step - 1) * accumulation + micro_step) % len(batches)]
                engine.micro_step(batch, first=micro_step == 0, last=micro_step == accumulation - 1)
            losses.append(engine.update(step, learning_rate).loss)  # waits for the device
            if counts:
                marks.append((start, clock.mark()))
            report(step, warmup + steps)
            if step == 1:
                first_step = time.perf_counter() - began
    finally:
        readings = watch.stop() if watch else ()
    seconds = tuple(1e-3 * clock.elapsed_ms(*pair) for pair in marks)
    ahead = math.ceil(AHEAD_S * accumulation / statistics.median(seconds)) if clock.is_queued else 0
    return Speed(
        plan=plan,
        tokens_per_step=accumulation * b * t,
        seconds=seconds,
        first_step_s=first_step,
        losses=tuple(losses),
        peak_bytes=backend.peak_bytes(),
        readings=readings,
        calls=tuple(clock.calls(engine, ahead)) if single_ops else (),
    )


@contextmanager
def _timed(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Says how long a part of the start took, if that was long."""
    began = time.perf_counter()
    yield
    if (seconds := time.perf_counter() - began) >= SLOW_S:
        say(f"{what} in {seconds:.1f} s")


def cold_calls(plan: Plan, backend: Backend, clock: Clock, wanted: Container[tuple[str, int]]) -> Iterator[TimedCall]:
    """Times the `wanted` calls alone (program, index): what each adds to a program of sweeps of the L2 cache.

    Calls run in order, so that each reads what training gives it. The next sweep writes back what a call leaves in the
    cache, so its time includes all of its own writes, and none of others.
    """
    spec = plan.spec
    engine, sweep = Engine(plan, backend), clock.sweep()
    engine.load(random_parameters(plan, spec.seed))
    batch = zipf_batch(spec.config.vocab_size, spec.batch_size, spec.seq_len, spec.seed)
    engine.warm_up(batch)
    clock.follow(backend)
    engine.start_step(1, 1e-5)
    engine.micro_step(batch)
    engine.update(1, 1e-5)
    sweeps_ms = clock.median_ms(backend.program([Launch(sweep)] * clock.copies))
    for name in TIMED:
        for index in range(len(plan.programs[name].calls)):
            if (name, index) not in wanted:
                engine.part(name, [index])()
                continue
            both_ms = clock.median_ms(engine.part(name, [index] * clock.copies, before=sweep))
            yield TimedCall(name, index, (both_ms - sweeps_ms) / clock.copies)


def paced(warmup: int, steps: int, *, least: int, end: float) -> Iterator[bool]:
    """Whether each step counts: `warmup` that do not, then `steps` that do; the caller makes one before the next.

    A step that would pass the moment `end`, being as long as the one before, is not begun; but `least` steps of the
    warm-up are, and one that counts.
    """
    counted, took = 0, 0.0
    for step in count(1):
        start = time.perf_counter()
        late = start + took > end
        if counted == steps or (counted and late):
            return
        counts = counted > 0 or step > warmup or (late and step > least)
        counted += counts
        yield counts
        took = time.perf_counter() - start


def random_parameters(plan: Plan, seed: int) -> Iterator[tuple[Row, Values]]:
    """Values of the usual size, N(0, 0.02) and ones, from one block of numbers, which a GPU repeats by itself: drawing
    billions takes minutes, and so does copying them.

    For the host they have the dtype of what holds them, unless that is a form, so that setting it is a plain copy.
    """
    block = np.random.default_rng(seed).standard_normal(BLOCK, np.float32) * np.float32(0.02)
    blocks = {np.dtype(np.float32): block}
    for row in plan.rows:
        held = plan.held(row.name)
        dtype = DTYPES[held.dtype if held.home == "host" and held.form is None else "fp32"]
        if dtype not in blocks:
            blocks[dtype] = block.astype(dtype)
        if row.init in ("ones", "zeros"):
            values = np.full(row.shape, row.init == "ones", dtype)
            values[row.parts[-1].stop :] = 0
            yield row, values
        else:
            yield row, Repeated(blocks[dtype], row.shape, row.parts[-1].stop)


def zipf_batch(vocab_size: int, b: int, t: int, seed: int) -> Batch:
    """Tokens and their successors, (B,T) int32 each, all trained."""
    weights = 1.0 / np.arange(1, vocab_size + 1) ** ZIPF
    edges = np.cumsum(weights / weights.sum())
    drawn = np.random.default_rng(seed).random((b, t + 1))
    tokens = np.minimum(np.searchsorted(edges, drawn), vocab_size - 1).astype(np.int32)
    return Batch(np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]))


class Clock:
    """Moments of the host: for backends whose ops return when they are done."""

    is_queued = False  # whether ops run later than they are called
    copies, replays = 1, 3  # of a call in one program, and runs of that, to time the call with cold caches

    def follow(self, backend: Backend) -> None:
        """From now on moments are those of this backend's work."""

    def calls(self, engine: Engine, ahead: int) -> Iterator[TimedCall]:
        """Every op of one micro-step and one update: the median of some eager runs on the engine's own memory.

        Before each of them the micro-step is run `ahead` times as it is in training, so that the device is never idle.
        Where ops are queued, the calls of an op that is called for each row share the time of all of them as one
        program, in proportion to their times alone.
        """
        by_op: dict[str, list[int]] = {}
        for index, step in enumerate(engine.plan.programs["update"].calls):
            if self.is_queued and record(step.op).for_each_row:
                by_op.setdefault(step.op, []).append(index)
        groups = list(by_op.values())
        alone, together = self._medians(engine, [engine.part("update", group) for group in groups], ahead)
        steps = [(name, index) for name in TIMED for index in range(len(engine.plan.programs[name].calls))]
        found = dict(zip(steps, alone, strict=True))
        for group, ms in zip(groups, together, strict=True):
            share = ms / sum(found["update", index] for index in group)
            found |= {("update", index): share * found["update", index] for index in group}
        for (name, index), ms in found.items():
            yield TimedCall(name, index, ms)

    def _medians(self, engine: Engine, parts: Sequence[Run], ahead: int) -> tuple[list[float], list[float]]:
        """Milliseconds of each op of the timed programs, run eagerly, and of each part as a whole."""
        marks: list[tuple[Any, Any]] = []

        def wrap(name: str, op: Op) -> Op:
            def timed(*arguments: Any, **numbers: Any) -> None:
                start = self.mark()
                op(*arguments, **numbers)
                marks.append((start, self.mark()))

            return timed

        for part in [*parts, *parts]:  # eagerly, then captured
            part()
        programs, rounds = [engine.traced(name, wrap) for name in TIMED], []
        for _ in range(REPEATS):
            for _ in range(ahead):
                engine.run("middle")
            for program in programs:
                program()
            for part in parts:
                start = self.mark()
                part()
                marks.append((start, self.mark()))
            rounds.append([self.elapsed_ms(*pair) for pair in marks])
            marks.clear()
        medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
        num_ops = len(medians) - len(parts)
        return medians[:num_ops], medians[num_ops:]

    def median_ms(self, run: Run) -> float:
        """Milliseconds of a program: the median of some runs. On a GPU, one runs eagerly and one captures first."""
        for _ in range(2 if self.is_queued else 0):
            run()
        times = []
        for _ in range(self.replays):
            start = self.mark()
            run()
            times.append(self.elapsed_ms(start, self.mark()))
        return statistics.median(times)

    def sweep(self) -> Run:
        """Evicts everything from the caches of the device; those of the host stay warm."""
        return lambda: None

    def mark(self) -> Any:
        """A moment."""
        return time.perf_counter()

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two moments."""
        return 1e3 * (end - start)


class CudaClock(Clock):
    """Moments of the GPU: events on the backend's stream, which the host does not wait for."""

    is_queued = True
    copies, replays = 8, 15

    def __init__(self) -> None:
        self._stream: Any = None

    def follow(self, backend: Any) -> None:
        """From now on moments are those of this backend's work."""
        self._stream = backend.stream

    def sweep(self) -> Run:
        """Overwrites the L2 cache, on the current stream."""
        import cupy

        swept = cupy.empty(SWEPT_BYTES, np.uint8)
        return lambda: swept.data.memset_async(0, SWEPT_BYTES)

    def mark(self) -> Any:
        """An event on the stream."""
        import cupy

        event = cupy.cuda.Event()
        event.record(self._stream)
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two events, once they have passed."""
        import cupy

        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end))
