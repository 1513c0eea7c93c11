"""Many ranks: what lives on the host changes no bit, at any level of sharing, and is a rank's own share of it."""

from dataclasses import replace

import numpy as np
import pytest
from ranks import CONFIG, LEVELS, Run, same, train
from tiny_engines import BF16, FP8_HEAD, PRECISIONS, plan_of

from llmq.backends.host import HostBackend
from llmq.comm.in_process import run_ranks
from llmq.plan.memory import Memory
from llmq.stores.sharding import Sharding
from llmq.tensor import Form, stored_bytes

STATES = ("master", "m", "v")
HOSTS = {"gradients": ("grad",)}
RUNS = {
    "bf16": Run(micro_steps=3),
    "fp8": Run(FP8_HEAD, micro_steps=2),
    "fp8-current": Run(PRECISIONS["fp8-e5m2-current"]),
    "fp8-rowwise": Run(PRECISIONS["fp8-e4m3-rowwise"]),
    "fp8-blockwise": Run(PRECISIONS["fp8-e4m3-blockwise"]),
    "fp32-master": Run(replace(BF16, master="fp32", grad="fp32"), micro_steps=2),
    "int8": Run(replace(BF16, m="int8", v="e4m3"), micro_steps=2),
    "exchanged": Run(how={"all_to_all": True}, micro_steps=2),
    "wire": Run(replace(BF16, grad="fp32"), how={"reduce_dtype": "bf16"}, micro_steps=2),
    "compressed": Run(how={"all_to_all": True, "compressed": Form("e4m3", "row", "tilewise")}, micro_steps=2),
}
SLOW, SWEEP = pytest.mark.slow, pytest.mark.sweep


def ranks(run, size):
    return run_ranks(size, lambda world: train(run, world, HostBackend(world=world)))


def check(run, memory, size):
    """Every rank's results, and its parameters, are those of the run with everything on the device."""
    plain = replace(run, memory=replace(memory, host=(), offload=()))
    assert all(map(same, ranks(replace(run, memory=memory), size), ranks(plain, size)))


def cases():
    """Each level with each flag; all other dtypes, sizes and ways of reducing only where more is asked for."""
    for name in RUNS:
        for level in LEVELS:
            for host in HOSTS:
                for size in (2, 3):
                    is_usual = name in ("bf16", "fp8") and size == 2
                    marks = () if name == "bf16" and size == 2 else SLOW if is_usual else SWEEP
                    yield pytest.param(name, level, host, size, id=f"{name}-{level}-{host}-{size}", marks=marks)


@pytest.mark.parametrize(("name", "level", "host", "size"), list(cases()))
def test_what_lives_on_the_host_is_bit_equal(name, level, host, size):
    check(replace(RUNS[name], level=level), Memory(host=HOSTS[host], piece_bytes=1), size)


def plan_at(level, memory, precision=BF16, size=2, config=CONFIG):
    return plan_of(precision, memory, config, sharding=Sharding(0, size, **LEVELS[level]))


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_on_the_host_take_no_place_on_the_device(level):
    """The host has what the device had: of each of two ranks all, or its share."""
    plain, plan = (plan_at(level, Memory(host=host)) for host in ((), ("grad",)))
    assert plan.table()["Gradients"] == 0 and plan.table("host")["Gradients"] == plain.table()["Gradients"] > 0


@pytest.mark.parametrize("level", [0, 1])
def test_only_what_a_rank_updates_is_sent_back_in_the_last_micro_step(level):
    """Its share of every sum, where states are shared out; of the tied embedding, what the head has added as well."""
    plan = plan_at(level, Memory(host=("grad",)))
    found = {
        name: sum(stored_bytes(c.written[0]) for c in plan.programs[name].calls if c.op == "copy_to_host")
        for name in ("middle", "last")
    }
    shares = sum(plan.shards.count(row.name) * row.shape[-1] for row in plan.rows) if level else None
    whole = sum(np.prod(row.shape) for row in plan.rows)
    tied = np.prod(plan.shape("embed.weight"))
    assert found == {"middle": 2 * (whole + tied), "last": 2 * (tied + (shares or whole))}
