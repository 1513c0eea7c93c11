"""A world of echoes fills what is received with own data; the collectives of a layer are counted by hand, and timed."""

import math

import numpy as np
import pytest
from in_process import run_ranks
from tiny_engines import BF16, FP32, plan_of, tiny

from llmq.backends.host import HostBackend
from llmq.bench import communication
from llmq.bench.communication import TIMES, EchoWorld, layer_rates, of_a_layer
from llmq.engine.engine import Engine
from llmq.engine.measure import Clock, random_parameters, zipf_batch
from llmq.ops.record import Call
from llmq.plan.levels import at_level
from llmq.stores.sharding import Sharding

CONFIG = tiny(num_layers=3, hidden_size=256, intermediate_size=512, head_dim=64, qkv_bias=False)


def plan_at(level, size=2, rank=0, precision=FP32):
    return plan_of(precision, config=CONFIG, sharding=at_level(Sharding(rank, size), level))


def test_an_echo_is_own_data_as_often_as_needed():
    world = EchoWorld(1, 3)
    incoming = [np.zeros(5, np.int32), np.zeros(2, np.int32), np.zeros(0, np.int32)]
    world.exchange([np.zeros(1, np.int32), np.array([1, 2, 3], np.int32), np.zeros(1, np.int32)], incoming)
    assert [list(one) for one in incoming] == [[1, 2, 3, 1, 2], [1, 2], []]
    assert world.gather("x") == ["x"] * 3 and (world.rank, world.size) == (1, 3)


@pytest.fixture
def copies(monkeypatch):
    """Copies within the GPU as (target, source, bytes)."""
    found = []
    monkeypatch.setattr(communication, "_copy", lambda *one: found.append(one))
    return found


def test_a_gather_of_echoes_copies_bytes_and_scales(copies):
    world = EchoWorld(1, 3)
    with world.group():
        for root, at in enumerate((1000, 2000, 3000)):
            world.broadcast(500 if root == 1 else at, at, 40 if root != 2 else 100, root)
            world.broadcast(at + 900, at + 900, 4, root)  # the scales of its rows
        assert copies == [(2000, 500, 40)]
    others = [(1000, 500, 40), (1900, 2900, 4), (3000, 500, 40), (3040, 500, 40), (3080, 500, 20), (3900, 2900, 4)]
    assert copies[1:] == others
    with world.group():  # a vector that another rank has alone
        world.broadcast(7000, 7000, 30, 0)
    assert copies[-1] == (7000, 500, 30)


def test_other_collectives_of_echoes(copies):
    world = EchoWorld(0, 2)
    with world.group():
        world.receive(100, 8, 1)
        world.send(300, 8, 1)
        world.reduce(1, 1, np.dtype("float32"), 0)
    world.all_reduce(20, 30, 2, np.dtype("float32"), largest=False)
    assert copies == [(100, 300, 8), (30, 20, 8)]
    with EchoWorld(0, 2).group() as nothing:
        assert nothing is None  # without anything sent so far, nothing is copied
    assert len(copies) == 2


@pytest.mark.parametrize("level", [*(pytest.param(level, marks=pytest.mark.slow) for level in range(3)), 3])
def test_training_on_echoes_stays_finite(level):
    """Else updates would be skipped, and take less time."""
    for rank in range(2):
        plan = plan_at(level, rank=rank, precision=BF16)
        engine = Engine(plan, HostBackend(world=EchoWorld(rank, 2)))
        engine.load(random_parameters(plan, 0))
        for step in range(2):
            engine.micro_step(zipf_batch(97, 2, 16, step))
            result = engine.update(step + 1, 1e-3)
            assert result.applied and math.isfinite(result.loss)


def phases(plan, calls):
    found: list[Call] = [plan.programs[calls.program].calls[index] for index in calls.indices]
    return {(call.op, call.phase) for call in found}


def test_collectives_of_a_layer_by_hand():
    heads, c, f = 4 + 2 * 2, 256, 512
    numbers = heads * 64 * c + 4 * 64 * c + 3 * c * f + 2 * c
    for level in range(4):
        plan = plan_at(level)
        reduce, gather = (of_a_layer(plan, gathers=gathers) for gathers in (False, True))
        assert reduce.num_bytes == gather.num_bytes == 4 * numbers // 2
        assert phases(plan, reduce) == {("reduce_scatter", "backward")}
        assert phases(plan, gather) == {("all_gather", "forward" if level else "backward")}
        assert reduce.program == ("first" if level > 1 else "last")
        assert gather.program == ("first" if level else "last")
    assert of_a_layer(plan_of(FP32, config=CONFIG), gathers=True) is None


class Ticks(Clock):
    """A millisecond for each moment, and what was run between two."""

    def __init__(self):
        self.now = 0

    def mark(self):
        self.now += 1
        return self.now

    def elapsed_ms(self, start, end):
        return float(end - start)


@pytest.mark.parametrize("level", [1, 3])
def test_rates_are_bytes_by_the_time_of_one_of_many(level):
    def work(world):
        plan = plan_at(level, rank=world.rank)
        return layer_rates(plan, HostBackend(world=world), Ticks()), of_a_layer(plan, gathers=True).num_bytes

    for rates, num_bytes in run_ranks(2, work):
        assert rates == {name: pytest.approx(1e3 * num_bytes * TIMES) for name in ("reduce", "gather")}
    alone = plan_of(FP32, config=CONFIG)
    assert layer_rates(alone, HostBackend(), Ticks()) == {"reduce": None, "gather": None}
