"""A world of echoes fills what is received with own data."""

import math

import numpy as np
import pytest
from tiny_engines import BF16, plan_of, tiny

from llmq.backends.host import HostBackend
from llmq.bench import echo
from llmq.bench.echo import EchoWorld
from llmq.engine.engine import Engine
from llmq.engine.measure import random_parameters, zipf_batch
from llmq.plan.levels import at_level
from llmq.stores.sharding import Sharding

CONFIG = tiny(num_layers=3, hidden_size=256, intermediate_size=512, head_dim=64, qkv_bias=False)


def plan_at(level, size=2, rank=0, precision=BF16):
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
    monkeypatch.setattr(echo, "_copy", lambda *one: found.append(one))
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
        plan = plan_at(level, rank=rank)
        engine = Engine(plan, HostBackend(world=EchoWorld(rank, 2)))
        engine.load(random_parameters(plan, 0))
        for step in range(2):
            engine.micro_step(zipf_batch(97, 2, 16, step))
            result = engine.update(step + 1, 1e-3)
            assert result.applied and math.isfinite(result.loss)
