"""Training speed of a model shape on this device: the trainer's own programs on generated tokens, and where time goes.

Tokens are drawn from a Zipf distribution, as words are, so that embedding and loss see realistic repetition. Weights
are random: zeros would draw less power and run faster than training does.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmq.backends import Backend, Op
from llmq.config import ModelConfig
from llmq.engine import Engine
from llmq.optimizer import Hyperparameters
from llmq.plan.memory import Memory
from llmq.plan.plan import Plan, make_plan
from llmq.plan.precision import Precision
from llmq.rows import Row

BLOCK = 1 << 20  # random values that fill all weights, over and over
ZIPF = 1.2

# (op, part of what it writes) -> family; the first that fits counts
FAMILIES = (
    ("linear_", ".head.", "head"),
    ("linear_", "head.logits", "head"),
    ("linear_wgrad", "embed.weight", "head"),
    ("linear_wgrad", "head.weight", "head"),
    ("linear_forward", "", "linears forward"),
    ("linear_dgrad", "", "linears dgrad"),
    ("linear_wgrad", "", "linears wgrad"),
    ("bias_backward", "", "linears wgrad"),
    ("attention_forward", "", "attention forward"),
    ("attention_backward", "", "attention backward"),
    ("rmsnorm", "", "norms"),
    ("qk_norm", "", "norms"),
    ("rope", "", "rope"),
    ("swiglu", "", "swiglu"),
    ("cast", "", "quantize"),
    ("amax_scale", "", "quantize"),
    ("cross_entropy", "", "cross-entropy"),
    ("loss_sum", "", "cross-entropy"),
    ("embedding", "", "embedding"),
)


def family(op: str, written: str) -> str:
    """The family that a call is counted in, by its op and the name of what it writes first."""
    return next((name for start, part, name in FAMILIES if op.startswith(start) and part in written), "optimizer")


@dataclass(frozen=True)
class Speed:
    """Measured steps: `seconds` of each, after the warm-up; all have `tokens_per_step` tokens."""

    plan: Plan
    tokens_per_step: int
    seconds: tuple[float, ...]
    first_step_s: float
    micro_step_ms: dict[str, float] = field(default_factory=dict)  # by family, one micro-batch, run eagerly
    update_ms: float = 0.0

    @property
    def tokens_per_second(self) -> tuple[float, float, float]:
        """(median, smallest, largest) over the steps."""
        rates = [self.tokens_per_step / s for s in self.seconds]
        return statistics.median(rates), min(rates), max(rates)


def measure(
    config: ModelConfig,
    precision: Precision,
    memory: Memory,
    backend: Backend,
    clock: Clock,
    *,
    batch_size: int,
    seq_len: int,
    tokens_per_step: int,
    steps: int = 10,
    warmup: int = 3,
    seed: int = 0,
) -> Speed:
    """Trains for `warmup` + `steps` optimizer steps; `clock` times single ops afterwards."""
    began = time.perf_counter()
    plan = make_plan(
        config,
        precision,
        memory,
        Hyperparameters(),
        batch_size=batch_size,
        seq_len=seq_len,
        seed=seed,
        scratch_bytes=backend.scratch_bytes,
    )
    engine = Engine(plan, backend)
    engine.load(random_parameters(plan, seed))
    accumulation = max(1, tokens_per_step // (batch_size * seq_len))
    batches = [zipf_batch(config.vocab_size, batch_size, seq_len, seed + i) for i in range(min(accumulation, 8))]
    if engine.needs_warm_up:
        engine.warm_up(*batches[0])
    seconds, first_step = [], 0.0
    for step in range(1, warmup + steps + 1):
        start = time.perf_counter()
        for micro_step in range(accumulation):
            engine.micro_step(*batches[micro_step % len(batches)], first=micro_step == 0)
        engine.update(step, 1e-5)  # waits for the device
        seconds.append(time.perf_counter() - start)
        if step == 1:
            first_step = time.perf_counter() - began
    families = clock.families(engine, batches[0])
    update_ms = families.pop("optimizer", 0.0)
    done = accumulation * batch_size * seq_len
    return Speed(plan, done, tuple(seconds[warmup:]), first_step, families, update_ms)


def random_parameters(plan: Plan, seed: int) -> Iterator[tuple[Row, np.ndarray]]:
    """Values of the usual size, N(0, 0.02) and ones, from one block of numbers: drawing billions takes minutes."""
    block = np.random.default_rng(seed).standard_normal(BLOCK, np.float32) * np.float32(0.02)
    for row in plan.rows:
        values = np.ones(row.shape, np.float32) if row.init == "ones" else np.resize(block, row.shape)
        if row.init == "zeros":
            values[...] = 0
        values[row.parts[-1].stop :] = 0
        yield row, values


def zipf_batch(vocab_size: int, b: int, t: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and their successors, (B,T) int32 each, all trained."""
    weights = 1.0 / np.arange(1, vocab_size + 1) ** ZIPF
    edges = np.cumsum(weights / weights.sum())
    drawn = np.random.default_rng(seed).random((b, t + 1))
    tokens = np.minimum(np.searchsorted(edges, drawn), vocab_size - 1).astype(np.int32)
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


class Clock:
    """Times every op of a micro-step and an update on the host: for backends whose ops return when they are done."""

    def families(self, engine: Engine, batch: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
        """Milliseconds by family of one micro-step and one update, run eagerly on the engine's own memory."""
        spent: dict[str, float] = defaultdict(float)

        def wrap(name: str, op: Op) -> Op:
            def timed(*arguments: Any, **numbers: Any) -> None:
                start = self.mark()
                op(*arguments, **numbers)
                marks.append((family(name, arguments[0].name), start, self.mark()))

            return timed

        marks: list[tuple[str, Any, Any]] = []
        engine.trace(batch, wrap)
        for name, start, end in marks:
            spent[name] += self.elapsed_ms(start, end)
        return dict(spent)

    def mark(self) -> Any:
        """A moment."""
        return time.perf_counter()

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two moments."""
        return 1e3 * (end - start)


class CudaClock(Clock):
    """The same with events on the current stream, which the host does not wait for."""

    def mark(self) -> Any:
        """An event on the stream."""
        import cupy

        event = cupy.cuda.Event()
        event.record()
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two events, once they have passed."""
        import cupy

        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end))
