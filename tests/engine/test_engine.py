"""The engine: accumulation, chunks, refused steps, empty batches, state, generation."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_engines import BF16, EVERY, FP8, FP32, FP64, batch, bits, engine_of, next_logits, plan_of, tiny, train_steps

from llmq.backends.host import HostBackend
from llmq.plan.memory import Memory
from llmq.plan.plan import SCALE_STRIDE


def gradients(engine):
    return {row.name: engine.gradient(row.name).astype(np.float64) for row in engine.plan.rows}


def test_a_step_adds_gradients_and_forgets_those_of_the_step_before():
    engine, found = engine_of(plan_of(FP64)), []
    for number in (1, 2, 1):
        engine.micro_step(batch(number))
        found.append(gradients(engine))
    engine.micro_step(batch(2), first=False)
    one, other, again = found
    for name, both in gradients(engine).items():
        assert np.array_equal(again[name], one[name])
        np.testing.assert_allclose(both, one[name] + other[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("chunks", [2, 4, 16])
def test_head_chunks_change_only_the_order_of_sums(chunks):
    plain, chunked = (engine_of(plan_of(FP64, Memory((), head_chunks=n))) for n in (1, chunks))
    for engine in (plain, chunked):
        engine.micro_step(batch())
    found = gradients(chunked)
    for name, value in gradients(plain).items():
        assert np.linalg.norm(found[name] - value) <= 1e-13 * np.linalg.norm(value), name
    assert chunked.plan.arena_bytes() < plain.plan.arena_bytes()


@EVERY
def test_two_runs_give_the_same_bits_and_another_seed_others(precision):
    results = [engine_of(plan_of(precision, seed=seed)) for seed in (0, 0, 1)]
    for engine in results:
        train_steps(engine)
    first, second, other = (bits(engine) for engine in results)
    assert first == second
    # the seed of stochastic rounding shows where bf16 is stored
    assert (first == other) == (precision is FP32)


@EVERY
def test_a_step_that_is_not_finite_changes_nothing(precision):
    engine = engine_of(plan_of(precision))
    train_steps(engine, steps=1)
    name = "head.norm"  # read in bf16 or wider: an fp8 copy would saturate to a finite number
    good = engine.parameter(name)
    before = {key: value for key, value in engine.state() if not key.startswith("scale:amax")}
    broken = good.copy()
    broken[0] = np.inf
    engine.load([(row, broken if row.name == name else engine.parameter(row.name)) for row in engine.plan.rows])
    engine.micro_step(batch())
    result = engine.update(2, 1e-2)
    assert not result.applied and not np.isfinite(result.norm)
    after = dict(engine.state())
    assert np.array_equal(after[f"master:{name}"], broken)
    for key, value in before.items():
        if key.startswith(("master:", "scale:")) and key != f"master:{name}":
            assert np.array_equal(after[key], value), key
        elif key.startswith(("m:", "v:")):
            assert not after[key].any(), key  # as loading left them
    engine.load([(row, good if row.name == name else engine.parameter(row.name)) for row in engine.plan.rows])
    assert np.isfinite(train_steps(engine, steps=3)).all()


@pytest.mark.quick("fp8*")
@EVERY
def test_a_restored_engine_continues_with_the_same_bits(precision):
    plan = plan_of(precision)
    engine = engine_of(plan)
    train_steps(engine, steps=2)
    saved = dict(engine.state())
    other = engine_of(plan, seed=9)
    train_steps(other, steps=1)
    other.restore(saved.__getitem__)
    assert other.evaluate(batch(5)) == engine.evaluate(batch(5))
    assert train_steps(other, steps=2) == train_steps(engine, steps=2)
    assert bits(other) == bits(engine)


def test_scales_are_settled_after_the_warm_up():
    engine = engine_of(plan_of(FP8["e5m2", "delayed"]))
    state = dict(engine.state())
    scales = state["scale:scales"][::SCALE_STRIDE]
    assert (scales > 0).all() and (scales != 1).all()
    fp8, wide = engine_of(plan_of(FP8["e5m2", "delayed"])), engine_of(plan_of(BF16))
    for run in (fp8, wide):
        run.micro_step(batch())
    a, b = (np.concatenate([g.ravel() for g in gradients(run).values()]) for run in (fp8, wide))
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.96


def test_evaluation_gives_the_training_loss_and_touches_nothing():
    engine = engine_of(plan_of(BF16))
    train_steps(engine)
    before = bits(engine)
    total, count, hits = engine.evaluate(batch(7))
    assert bits(engine) == before
    engine.micro_step(batch(7))
    result = engine.update(3, 0.0)
    assert count == result.num_tokens and total / count == pytest.approx(result.loss, rel=1e-6)
    assert hits / count == result.accuracy


@pytest.mark.parametrize("chunks", [1, 4])
def test_accuracy_is_the_share_of_all_trained_tokens_whose_target_has_the_largest_logit(chunks):
    engine, given = engine_of(plan_of(FP32, Memory(head_chunks=chunks))), batch(3)
    ends = [(row, count) for row in given.tokens for count in range(1, 1 + row.size)]
    likely = np.array([next_logits(engine, row[:count]).argmax() for row, count in ends]).reshape(given.tokens.shape)
    targets = likely.astype(np.int32)
    targets[:, ::3], targets[1, 1::3] = (targets[:, ::3] + 1) % 97, -100
    right, trained = np.count_nonzero(targets == likely), np.count_nonzero(targets != -100)
    assert engine.evaluate(replace(given, targets=targets))[1:] == (trained, right) and 0 < right < trained
    engine.micro_step(replace(given, targets=targets), last=False)
    engine.micro_step(replace(given, targets=likely.astype(np.int32)), first=False)
    assert engine.update(1, 0.0).accuracy == (right + likely.size) / (trained + likely.size)


@pytest.mark.parametrize("vocab", [97, 128, 129])
def test_the_padding_of_the_vocabulary_stays_zero_and_has_no_probability(vocab):
    engine = engine_of(plan_of(FP32, config=tiny(vocab_size=vocab, tie_embeddings=False)))
    train_steps(engine)
    for name in ("embed.weight", "head.weight"):
        assert not engine.parameter(name)[vocab:].any()
    engine.load([(r, np.zeros(r.shape) if r.name == "head.weight" else np.ones(r.shape)) for r in engine.plan.rows])
    total, count, _ = engine.evaluate(batch())
    assert total / count == pytest.approx(np.log(vocab), rel=1e-6)


class ScratchBackend(HostBackend):
    """Norms that need scratch, and note where it is."""

    takes_scratch = True

    def __init__(self):
        super().__init__()
        self.given = []
        norm = self.ops["rmsnorm_forward"]

        def noted(*handles, scratch, **numbers):
            self.given.append(scratch)
            norm(*handles, **numbers)

        self.ops = {**self.ops, "rmsnorm_forward": noted}

    def scratch_bytes(self, step):
        return 1000 if step.op == "rmsnorm_forward" else 0


def test_two_engines_of_one_backend_have_scratch_of_their_own():
    """Called in turn: an engine that is gone, or larger, leaves nothing."""
    backend = ScratchBackend()
    engines = [engine_of(plan_of(FP32, scratch_bytes=backend.scratch_bytes), backend=backend) for _ in range(2)]
    assert engines[0].plan.table()["Workspace"] == 1024
    found = []
    for engine in (*engines, engines[0]):
        backend.given.clear()
        engine.micro_step(batch())
        addresses = {scratch.ctypes.data for scratch in backend.given}
        assert len(backend.given) == 5 and {scratch.nbytes for scratch in backend.given} == {1000}
        found.append(addresses)
    assert all(len(addresses) == 1 for addresses in found)
    assert found[0] == found[2] != found[1]
