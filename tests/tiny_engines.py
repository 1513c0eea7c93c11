"""Small models for tests of the plan and the engine: tiny shapes of every wiring, random weights, random tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmq.backends import Backend, Op
from llmq.backends.host import HostBackend
from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine
from llmq.model.config import ModelConfig
from llmq.model.optimizer import Hyperparameters
from llmq.ops.record import Call
from llmq.plan.memory import Memory
from llmq.plan.plan import Plan, make_plan
from llmq.plan.precision import Precision
from llmq.plan.spec import Spec
from llmq.row import Row

VOCAB, B, T = 97, 2, 16
FP32 = Precision()
FP64 = Precision("fp64", "fp64", m="fp64", v="fp64", master="fp64", grad="fp64")
BF16 = Precision("bf16", "bf16", m="bf16", v="bf16", master="bf16", grad="bf16")
SCALINGS = ("delayed", "current", "rowwise", "blockwise")
FP8 = {
    (gradient, scaling): Precision("bf16", "e4m3", gradient, scaling, "bf16", "bf16", "bf16", "bf16")
    for gradient in ("e4m3", "e5m2")
    for scaling in SCALINGS
}
FP8_HEAD = replace(FP8["e4m3", "delayed"], head="e4m3")
PRECISIONS = {
    "fp32": FP32,
    "bf16": BF16,
    **{f"fp8-{'-'.join(key)}": value for key, value in FP8.items()},
    "fp8-head": FP8_HEAD,
    "fp8-some": replace(FP8_HEAD, scaling="current", wide=("layers.0.mlp.down", "layers.1.attention.qkv")),
}


def every(*usual: str) -> pytest.MarkDecorator:
    """Every precision, those that are not named in slow tests."""
    return pytest.mark.parametrize(
        "precision",
        [pytest.param(p, id=name, marks=[] if name in usual else pytest.mark.slow) for name, p in PRECISIONS.items()],
    )


EVERY = every("bf16", "fp8-e5m2-delayed")


def tiny(**changes: object) -> ModelConfig:
    """Two layers of Qwen2's wiring (GQA, qkv bias, tied embeddings), or with `changes`."""
    shape = {
        "architecture": "Qwen2ForCausalLM",
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "rms_norm_eps": 1e-6,
        "max_position": 64,
        "tie_embeddings": True,
        "qkv_bias": True,
    }
    return ModelConfig(**{**shape, **changes})


def streams(config: ModelConfig) -> tuple[str, ...]:
    """The residual stream that enters each layer."""
    return tuple(f"0/{layer}.attention.res" for layer in range(config.num_layers))


def spec_of(
    precision: Precision = FP32,
    memory: Memory | None = None,
    config: ModelConfig | None = None,
    hyper: Hyperparameters | None = None,
    **more: object,
) -> Spec:
    """B x T tokens of a tiny model; `more` are further fields."""
    shape = {"batch_size": B, "seq_len": T, **more}
    return Spec(config or tiny(), precision, memory or Memory(), hyper or Hyperparameters(), **shape)


def plan_of(*about: Any, scratch_bytes: Callable[[Call], int] | None = None, **more: Any) -> Plan:
    """The plan of such a spec."""
    return make_plan(spec_of(*about, **more), scratch_bytes)


def parameters(plan: Plan, seed: int = 0) -> list[tuple[Row, np.ndarray]]:
    """Random parameters, norms around 1, the padding of the vocabulary zero."""
    rng = np.random.default_rng(seed)
    found = []
    for row in plan.rows:
        values = rng.standard_normal(row.shape) * 0.1 + (row.init == "ones")
        values[row.parts[-1].stop :] = 0
        found.append((row, values))
    return found


def batch(seed: int = 1, b: int = B, t: int = T, vocab: int = VOCAB) -> Batch:
    """Random tokens and targets, one target in eight not trained."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, vocab, (2, b, t)).astype(np.int32)
    targets[rng.random(targets.shape) < 1 / 8] = -100
    return Batch(tokens, targets)


def placed_batch(index: int, b: int, t: int, vocab: int) -> Batch:
    """The batch of an index, that knows its samples."""
    return replace(batch(index, b, t, vocab), places=np.arange(b) + b * index)


def arrays(batch: Batch) -> tuple[np.ndarray, ...]:
    """Tokens and targets of a batch, and borders where it has them."""
    return tuple(part for part in (batch.tokens, batch.targets, batch.borders) if part is not None)


def packed_batch(seed: int = 1, max_docs: int = 5) -> Batch:
    """Tokens, targets and borders: a full row, and rows of fewer documents with padding behind."""
    plain = batch(seed)
    tokens, targets = plain.tokens, plain.targets
    rng = np.random.default_rng(seed)
    borders = np.full((B, max_docs + 1), T, np.int32)
    for row in range(B):
        starts = [0, *sorted(1 + rng.choice(T - 1, max_docs - 1 - row, replace=False)), T]
        borders[row, : len(starts)] = starts
        targets[row, np.array(starts[1:]) - 1] = -100
        if row:
            tokens[row, -2:], targets[row, -3:] = 0, -100
    return Batch(tokens, targets, borders)


def engine_of(
    plan: Plan, *, seed: int = 0, poison: bool = True, backend: Backend | None = None, warm: Batch | None = None
) -> Engine:
    """An engine with random parameters and scales settled by a batch (`warm`), on the CPU or on `backend`."""
    engine = Engine(plan, backend or HostBackend(), poison=poison)
    engine.load(parameters(plan, seed))
    if warm is not None:
        engine.warm_up(warm)
    else:
        b, t = plan.spec.batch_size, plan.spec.seq_len
        borders = None if plan.spec.packing is None else np.array([[0, t]] * b, np.int32)
        engine.warm_up(replace(batch(b=b, t=t), borders=borders))
    return engine


def next_logits(engine: Engine, tokens: np.ndarray) -> np.ndarray:
    """Logits (V,) of the token after `tokens` (n,), n <= seq_len, as evaluation makes its loss of them."""
    spec, found = engine.plan.spec, []

    def wrap(name: str, op: Op) -> Op:
        def call(*handles: Any, **numbers: Any) -> None:
            if name == "cross_entropy":
                array = handles[3].array
                found.append(np.array(array.get() if hasattr(array, "get") else array))
            op(*handles, **numbers)

        return call

    padded = np.zeros((spec.batch_size, spec.seq_len), np.int32)
    padded[0, : len(tokens)] = tokens
    borders = None if spec.packing is None else np.array([[0, spec.seq_len]] * spec.batch_size, np.int32)
    engine.feed(Batch(padded, padded, borders))
    engine.traced("evaluate", wrap)()
    logits = np.concatenate(found)[len(tokens) - 1, : spec.config.vocab_size]
    return logits if logits.dtype == np.float64 else logits.astype(np.float32)


def train_steps(engine: Engine, steps: int = 2, accumulation: int = 2, rate: float = 1e-2) -> list[float]:
    """Losses of a few optimizer steps on random batches."""
    losses = []
    for step in range(1, steps + 1):
        for micro_step in range(accumulation):
            one = batch(100 * step + micro_step, engine.plan.spec.batch_size, engine.plan.spec.seq_len)
            engine.micro_step(one, first=micro_step == 0, last=micro_step == accumulation - 1)
        losses.append(engine.update(step, rate).loss)
    return losses


def result_of(plan: Plan, backend: Backend | None = None, accumulation: int = 2) -> tuple[object, ...]:
    """Losses of a few steps on a plan, everything that they changed, and what the model says after them."""
    engine = engine_of(plan, backend=backend)
    losses = train_steps(engine, accumulation=accumulation)
    return losses, bits(engine), engine.evaluate(batch(9)), next_logits(engine, np.arange(7)).tobytes()


def fused_result_of(plan: Plan, steps: int = 3) -> tuple[object, ...]:
    """Results of steps of a micro-batch each, whose weights may be updated in backward, and the state after them."""
    engine, results = engine_of(plan), []
    for step in range(1, steps + 1):
        engine.start_step(step, 1e-2)
        engine.micro_step(batch(step))
        results.append(engine.update(step, 1e-2))
    return results, {name: array.tobytes() for name, array in engine.state()}, engine.evaluate(batch(9))


def bits(engine: Engine) -> dict[str, bytes]:
    """Everything that training changed, as bytes."""
    found = {name: array.tobytes() for name, array in engine.state()}
    found |= {f"grad:{row.name}": engine.gradient(row.name).tobytes() for row in engine.plan.rows if row.trainable}
    return found


def assert_slopes(engine, *names):
    """Gradients of parameters are those of finite differences, each along a direction."""
    rng, step = np.random.default_rng(0), 1e-5
    values = {row.name: engine.parameter(row.name) for row in engine.plan.rows}

    def loss(name, change):
        engine.load([(row, values[row.name] + (change if row.name == name else 0)) for row in engine.plan.rows])
        engine.micro_step(batch())
        result = engine.update(1, 0.0)
        return result.num_tokens * result.loss

    loss("", 0)
    for name in names:
        gradient = engine.gradient(name)
        direction = rng.standard_normal(gradient.shape)
        slope = (loss(name, step * direction) - loss(name, -step * direction)) / (2 * step)
        loss("", 0)
        assert slope == pytest.approx(float(np.sum(gradient * direction)), rel=2e-6), name
