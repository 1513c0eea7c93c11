"""The embedding with noise (NEFTune): in training only, a function of the sample, and passed by the gradient."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_engines import BF16, FP8, FP32, FP64, arrays, batch, bits, engine_of, next_logits, parameters, plan_of, tiny

from llmq.backends.host import HostBackend
from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine
from llmq.plan.memory import Memory
from llmq.plan.spec import Regularization

NOISE = Regularization(neftune_alpha=5.0)
PLACES = np.array([2**33 + 5, 17])


def test_noise_is_in_training_and_nowhere_else():
    plain, noisy = engine_of(plan_of(FP32)), engine_of(plan_of(FP32, regularization=NOISE))
    assert noisy.evaluate(batch()) == plain.evaluate(batch())
    assert np.array_equal(next_logits(noisy, batch().tokens[0]), next_logits(plain, batch().tokens[0]))
    losses = []
    for engine, places in ((plain, None), (noisy, PLACES), (noisy, PLACES), (noisy, PLACES + 1)):
        engine.micro_step(replace(batch(), places=places))
        losses.append(engine.update(1, 0.0).loss)
    assert len(set(losses)) == 3 and losses[1] == losses[2]
    for engine, names in ((plain, set()), (noisy, {"only", "first", "middle", "last"})):
        programs = engine.plan.programs.items()
        assert {name for name, p in programs if "embedding_noise" in {call.op for call in p.calls}} == names
    assert plain.plan.arena_bytes() == noisy.plan.arena_bytes()  # it is added in place


@pytest.mark.parametrize("dtypes", [FP32, BF16, FP8["e5m2", "delayed"]], ids=["fp32", "bf16", "fp8"])
def test_noise_is_the_same_whatever_is_recomputed(dtypes):
    losses, states = set(), []
    for memory in (Memory(), Memory(("recompute_block",))):
        engine = Engine(plan_of(dtypes, memory, regularization=NOISE), HostBackend(), poison=True)
        engine.load(parameters(engine.plan))
        engine.warm_up(replace(batch(), places=PLACES))
        engine.micro_step(replace(batch(), places=PLACES))
        losses.add(engine.update(1, 1e-2).loss)
        states.append(bits(engine))
    assert len(losses) == 1 and states[0] == states[1]


def test_noise_follows_the_sample_through_any_split():
    tokens, targets = arrays(batch(3, b=4))
    places = np.array([9, 2, 40, 11])
    whole = engine_of(plan_of(FP64, batch_size=4, regularization=NOISE))
    whole.micro_step(Batch(tokens, targets, places=places))
    parts = engine_of(plan_of(FP64, batch_size=2, regularization=NOISE))
    for rows in (slice(2, 4), slice(0, 2)):
        parts.micro_step(Batch(tokens[rows], targets[rows], places=places[rows]), first=rows.start == 2)
    for row in whole.plan.rows:
        value, found = whole.gradient(row.name), parts.gradient(row.name)
        # sums of 64 tokens in another order, in f64
        assert np.linalg.norm(found - value) <= 1e-12 * np.linalg.norm(value), row.name


def test_the_gradient_passes_the_noise():
    """The table's gradient in an untied model by central differences: off by h^2 = 1e-8 and 2^-53 / h = 1e-12."""
    plan = plan_of(FP64, config=tiny(tie_embeddings=False), regularization=NOISE)
    engine, values = Engine(plan, HostBackend()), parameters(plan)
    (name,) = [row.name for row, _ in values if "embed" in row.name]
    (table,) = [value for row, value in values if row.name == name]
    direction = np.random.default_rng(5).standard_normal(table.shape)
    losses, slope = [], 0.0
    for step in (0, 1e-4, -1e-4):
        engine.load([(row, value + step * direction if row.name == name else value) for row, value in values])
        engine.micro_step(replace(batch(), places=PLACES))
        slope = slope or float(np.sum(engine.gradient(name) * direction))
        done = engine.update(1, 0.0)
        losses.append(done.loss * done.num_tokens)
    assert (losses[1] - losses[2]) / 2e-4 == pytest.approx(slope, rel=1e-5)
