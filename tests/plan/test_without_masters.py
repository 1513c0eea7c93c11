"""Weights in e4m3 with no wider copy: what they take, what they read as, how they train, move and are saved."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from tiny_engines import BF16, FP8, FP32, batch, bits, engine_of, plan_of, tiny

from llmq.backends.planned import PlannedBackend
from llmq.operands import Output, Tensor
from llmq.stores.fetched_weights import MASTER_FORM
from llmq.tensor import DTYPES

CONFIG = tiny(vocab_size=300, intermediate_size=176)
NONE = replace(BF16, master="none", m="int8", v="e4m3")
SLOW = pytest.mark.slow
FP8_NONE = {name: replace(FP8["e4m3", name], master="none") for name in ("delayed", "current", "rowwise", "blockwise")}
EVERY = pytest.mark.parametrize(
    "precision",
    [
        pytest.param(replace(FP32, master="none"), id="fp32", marks=SLOW),
        pytest.param(NONE, id="bf16", marks=SLOW),
        *(pytest.param(p, id=name, marks=() if name == "delayed" else SLOW) for name, p in FP8_NONE.items()),
    ],
)


def test_a_matrix_takes_a_byte_and_a_scale_for_128_of_a_row():
    plain, plan = plan_of(replace(NONE, master="bf16"), None, CONFIG), plan_of(NONE, None, CONFIG)
    held = [row for row in plan.rows if row.stored is not None]
    assert {row.name.split(".")[3] for row in held} == {"qkv", "o", "up", "down"}
    scales = sum(4 * np.prod(row.shape[:-1]) * -(-row.shape[-1] // 128) for row in held)
    saved = plain.table()["Weights"] - plan.table()["Weights"]
    assert abs(saved - sum(np.prod(row.shape) for row in held) + scales) <= 2 * 256 * len(held)  # aligned
    assert not plan.table()["Master"]
    whole = {ref.name for ref in plan.persistent.values() if ref.form is None and ref.space in ("weight", "master")}
    assert whole.isdisjoint(row.name for row in held)


@EVERY
def test_the_model_trains_and_has_the_bits_of_its_state(precision):
    """Restored."""
    plan = plan_of(precision, None, CONFIG)
    engine = engine_of(plan)
    losses = [step(engine, n) for n in range(1, 9)]
    assert losses[-1] < 0.8 * losses[0]
    other = engine_of(plan, seed=9)
    other.restore(dict(engine.state()).__getitem__)
    assert step(other, 9) == step(engine, 9) and bits(other) == bits(engine)


def step(engine, number, lr=1e-2):
    """The loss of a step on one and the same batch."""
    engine.start_step(number, lr)
    engine.micro_step(batch(1))
    return engine.update(number, lr).loss


@pytest.mark.parametrize("scaling", FP8_NONE)
def test_kernels_can_make_every_copy_of_them(scaling):
    """Of the value: nothing else is made of the bytes."""
    config = tiny(vocab_size=1000, hidden_size=64, head_dim=16, intermediate_size=320)
    plan = plan_of(FP8_NONE[scaling], None, config, scratch_bytes=PlannedBackend().scratch_bytes, seq_len=64)
    reads = [call for call in plan.programs["only"].calls if any(r and r.form == MASTER_FORM for r in call.inputs)]
    assert reads and all(call.op == "cast" and call.outputs[0].forms == (None,) for call in reads)


def test_what_is_read_is_what_was_loaded_rounded_to_nearest():
    """And read again, it does not change: a step whose rate is 0 leaves every number where it is."""
    plan = plan_of(NONE, None, CONFIG)
    engine = engine_of(plan)
    held = [row.name for row in plan.rows if row.stored is not None]
    before = {name: engine.parameter(name) for name in held}
    step(engine, 1, lr=0.0)
    for name in held:
        np.testing.assert_array_equal(engine.parameter(name), before[name])
    step(engine, 2)
    assert any(not np.array_equal(engine.parameter(name), before[name]) for name in held)


def test_scales_are_powers_of_two_that_hold_the_largest():
    row = next(row for row in plan_of(NONE, None, CONFIG).rows if row.stored is not None)
    value = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32) * 10.0 ** np.arange(-4, 0)[:, None]
    scale = np.empty((4, 3), np.float32)
    copy = Tensor("w", np.empty((4, 300), DTYPES["e4m3"]), (4, 300), row.stored, scale)
    Output("w", (4, 300), "bf16", (copy,)).write(value)
    amax = np.abs(np.pad(value, ((0, 0), (0, 84)))).reshape(4, 3, 128).max(axis=2)
    assert np.all(np.log2(scale) % 1 == 0)
    assert np.all((amax / scale <= 448) & (amax / scale > 224))
    rounded = np.repeat(scale, 128, axis=1)[:, :300] * 2.0**-10  # half of a step among subnormal numbers
    found = np.abs(copy.read() - value.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.all(found <= np.abs(value) / 16 * (1 + 2**-7) + rounded)
