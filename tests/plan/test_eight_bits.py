"""Optimizer states in 8 bits: on ranks, on the host and in checkpoints they are the same numbers, in fewer bytes."""

from dataclasses import replace

import numpy as np
import pytest
from in_process import run_ranks
from ranks import CONFIG as RANKS_CONFIG
from ranks import LEVELS, Run, rank_batch
from tiny_engines import BF16, FP32, batch, engine_of, plan_of, tiny, train_steps

from llmq.backends.host import HostBackend
from llmq.model.optimizer import Hyperparameters
from llmq.optimizers.sgd import Sgd
from llmq.plan.memory import Memory
from llmq.plan.names import storage_name
from llmq.stores.sharding import Sharding
from llmq.tensor import DTYPES

CONFIG = tiny(vocab_size=300, intermediate_size=176)  # matrices of several tiles of 128 rows, the last one short
DTYPES_8 = [("e4m3", "int8"), ("int8", "e4m3")]


def eight(m, v):
    return replace(BF16, m=m, v=v, master="fp32")


@pytest.mark.parametrize(("m", "v"), DTYPES_8)
def test_a_moment_in_8_bits_takes_a_byte_and_a_scale_for_128_of_a_row(m, v):
    plain, plan = plan_of(eight("fp32", "fp32"), None, CONFIG), plan_of(eight(m, v), None, CONFIG)
    for category, ref in (("Adam M", "m"), ("Adam V", "v")):
        stored = [one for name, one in plan.persistent.items() if name.startswith(f"{ref}:")]
        codes = sum(np.prod(one.shape) for one in stored if one.form is not None)
        assert 4 * codes == sum(4 * np.prod(row.shape) for row in plan.rows)
        assert plan.table()[category] < plain.table()[category] / 3.5
    found = {one.form.dtype for one in plan.persistent.values() if one.space == "v" and one.form is not None}
    assert DTYPES[found.pop()].itemsize == 1 and not found


def trained(level, size, memory=None, precision=None, hyper=None):
    """State of all ranks after two steps, by storage: slices with their places in the whole."""

    def one(world):
        sharding = Sharding(world.rank, world.size, **LEVELS[level]) if size > 1 else Sharding()
        plan = plan_of(precision or eight("e4m3", "int8"), memory, RANKS_CONFIG, hyper, sharding=sharding)
        engine = engine_of(plan, backend=HostBackend(world=world))
        for step in (1, 2):
            engine.micro_step(rank_batch(Run(), step, 0, 0))
            engine.update(step, 1e-2)
        saved = plan.saved()
        return [(name, saved[name], value) for name, value in engine.state()], engine.parameter("embed.weight")

    return run_ranks(size, one)


def whole_of(ranks):
    """The tensors that slices make up."""
    found = {}
    for parts, _ in ranks:
        for name, at, value in parts:
            whole = found.setdefault(name, np.zeros(at.whole, value.dtype))
            assert DTYPES[at.dtype] == value.dtype and value.shape == at.shape
            whole[tuple(slice(start, start + n) for start, n in zip(at.start, at.shape, strict=True))] = value
    return found


HOSTED = Memory(host=("m", "v"), piece_bytes=1)
NONE = replace(BF16, master="none", m="int8", v="e4m3")
SGD = [Hyperparameters(Sgd(momentum)) for momentum in (0.0, 0.9)]


@pytest.mark.parametrize(
    ("level", "memory", "precision", "hyper"),
    [
        *((level, HOSTED, None, None) for level in (1, 3)),
        pytest.param(0, HOSTED, None, None, marks=pytest.mark.slow),
        *(pytest.param(level, None, None, None, marks=pytest.mark.slow) for level in (0, 1, 3)),
        *((level, None, eight("int8", "fp32"), hyper) for level in (1, 3) for hyper in SGD),
        (0, None, NONE, None),
    ],
)
def test_shares_of_states_are_those_of_the_whole(level, memory, precision, hyper):
    """Two ranks that train on the same batch have the codes and scales of one that has all of them."""
    one, two = (whole_of(trained(level, size, moved, precision, hyper)) for size, moved in ((1, None), (2, memory)))
    assert set(one) == set(two)
    assert any(name.startswith("m:") for name in one) == (hyper is not SGD[0])
    assert any(name.endswith("@e4m3/row/powers") for name in one) == (precision is NONE)
    for name, value in one.items():
        assert value.tobytes() == two[name].tobytes(), name


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), pytest.param((2, 3), marks=pytest.mark.slow)], ids=str)
def test_a_checkpoint_with_moments_in_8_bits_is_read_by_another_number_of_ranks(sizes):
    before, after = sizes
    saved = whole_of(trained(1, before))

    def read(name, start=None, shape=None):
        value = saved[name]
        return value if shape is None else value[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]

    def one(world):
        sharding = Sharding(world.rank, world.size, **LEVELS[1]) if after > 1 else Sharding()
        plan = plan_of(eight("e4m3", "int8"), None, RANKS_CONFIG, sharding=sharding)
        engine = engine_of(plan, backend=HostBackend(world=world))
        engine.restore(read)
        return [(name, plan.saved()[name], value) for name, value in engine.state()], None

    again = whole_of(run_ranks(after, one))
    assert {name: value.tobytes() for name, value in again.items()} == {n: v.tobytes() for n, v in saved.items()}


def test_no_second_moment_of_a_trained_number_is_zero():
    """Also where gradients of a block differ by orders of magnitude: m / epsilon would be a step of any size."""
    for v in ("e4m3", "int8"):
        plan = plan_of(eight("fp32", v), None, CONFIG)
        engine = engine_of(plan)
        train_steps(engine)
        state = dict(engine.state())
        for moments in plan.moments.values():
            codes, m = state[storage_name(moments["v"])].view(np.uint8), state[storage_name(moments["m"])]
            assert not np.any((codes == 0) & (np.abs(m) > 1e-20)), moments["v"].name


@pytest.mark.parametrize("base", [None, pytest.param("e4m3", marks=pytest.mark.slow)])
def test_adapters_train_with_moments_in_8_bits(base):
    """Rows of 4 numbers: blocks are as wide as they are."""
    from test_adapters import adapters, steps

    plan = plan_of(eight("int8", "e4m3"), None, CONFIG, adapters=adapters(config=CONFIG, base=base))
    plain = plan_of(eight("fp32", "fp32"), None, CONFIG, adapters=adapters(config=CONFIG, base=base))
    found, expected = (steps(engine_of(one), 4) for one in (plan, plain))
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    assert found != expected


@pytest.mark.parametrize(
    ("m", "v"),
    [
        *DTYPES_8,
        pytest.param("e4m3", "e4m3", marks=pytest.mark.slow),
        pytest.param("int8", "int8", marks=pytest.mark.slow),
    ],
)
def test_moments_in_8_bits_train_as_wide_ones(m, v):
    """The same model and batches; the losses of ten steps, which fall by a third."""
    losses = {}
    for name, dtypes in (("wide", ("fp32", "fp32")), ("eight", (m, v))):
        engine = engine_of(plan_of(replace(FP32, m=dtypes[0], v=dtypes[1]), None, CONFIG))
        losses[name] = [engine_step(engine, step) for step in range(1, 11)]
    assert losses["wide"][-1] < 0.7 * losses["wide"][0]
    np.testing.assert_allclose(losses["eight"], losses["wide"], rtol=0.02)


def engine_step(engine, step):
    """The loss of a step on one and the same batch."""
    engine.micro_step(batch(1))
    return engine.update(step, 1e-2).loss
