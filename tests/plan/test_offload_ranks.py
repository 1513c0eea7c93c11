"""Many ranks: what lives on the host changes no bit, at any level of sharing, and is a rank's own share of it."""

import random
from dataclasses import replace
from itertools import groupby, product

import numpy as np
import pytest
from in_process import run_ranks
from random_plans import AnyOrder, drawn
from ranks import CONFIG, LEVELS, Run, on_ranks, rank_batch, same, train
from tiny_engines import BF16, FP8, FP8_HEAD, PRECISIONS, engine_of, plan_of

from llmq.adapters.lora import Lora
from llmq.adapters.targets import chosen, targets
from llmq.backends.host import HostBackend
from llmq.plan.memory import RESIDUAL, Memory
from llmq.stores.sharding import Sharding
from llmq.tensor import Form, stored_bytes

STATES = ("master", "m", "v")
HOSTS = {
    "gradients": ("grad",),
    "weights": ("weight", "master"),
    "quants": ("quant",),
    "all": ("grad", "weight", *STATES),
}
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
_TARGETS = targets(chosen("q_proj,v_proj,mlp", CONFIG), 4, 8.0, rslora=False)
RUNS["adapters"] = Run(more={"adapters": Lora(4, 8.0, _TARGETS, base="e4m3")}, micro_steps=2)
SLOW, SWEEP = pytest.mark.slow, pytest.mark.sweep


def check(run, memory, size):
    """Every rank's results, and its parameters, are those of the run with everything on the device."""
    plain = replace(run, memory=replace(memory, host=(), offload=()))
    assert all(map(same, on_ranks(replace(run, memory=memory), size), on_ranks(plain, size)))


USUAL = {("bf16", 2, "all"), ("fp8", 3, "quants")}


def cases():
    """Of two levels two flags; each level with all on the host, all other dtypes, sizes and ways of reducing
    where more is asked for."""
    for name, level, host, size in product(RUNS, LEVELS, HOSTS, (2, 3)):
        marks = (
            ()
            if size == 2 and (name, level, host) in USUAL
            else SLOW
            if size == 2
            and (name == "fp8" or (name, host) == ("bf16", "all") or (name, level, host) == ("bf16", 0, "gradients"))
            else SWEEP
        )
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


BETWEEN = {"shard-weights": {"weights": True}, "shard-gradients": {"gradients": True}}


@pytest.mark.parametrize("between", ["shard-gradients", pytest.param("shard-weights", marks=SLOW)])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp8", marks=SLOW)])
def test_what_is_between_two_levels_lives_on_the_host_too(between, precision):
    run = replace(RUNS[precision], level=1, how=BETWEEN[between])
    check(run, Memory(("recompute_block",), offload=(RESIDUAL,), host=HOSTS["all"]), 2)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=SLOW if n < 12 else SWEEP) for n in range(1, 24))])
def test_random_combinations_in_any_order_are_bit_equal(seed):
    """Of flags, levels, numbers of ranks and micro-steps, and ways of summing; each rank runs its calls in an order of
    its own that lanes and waits allow, with poisoned arenas."""
    draw, (precision, plain, hosted) = random.Random(seed), drawn(seed)
    how = draw.choice([{}, {"all_to_all": True}, RUNS["compressed"].how])
    level = draw.choice([*LEVELS])
    hosted = replace(hosted, persistent_quants=hosted.persistent_quants or level > 0)  # else no rank has all masters
    run = Run(precision, level, plain, micro_steps=draw.choice([1, 2, 3]), how=how)
    size = draw.choice([2, 3])
    ordered = run_ranks(size, lambda world: train(replace(run, memory=hosted), world, AnyOrder(seed, world)))
    assert all(map(same, ordered, on_ranks(run, size)))


HOSTED = Memory(host=HOSTS["all"])
DEEP = replace(HOSTED, flags=("recompute_block",), offload=(RESIDUAL,))


@pytest.mark.sample
@pytest.mark.parametrize("level", [0, 3, *(pytest.param(level, marks=SLOW) for level in (1, 2))])
@pytest.mark.parametrize("precision", ["bf16", "fp8-e4m3-delayed", pytest.param("fp8-e5m2-current", marks=SLOW)])
def test_nothing_on_the_device_grows_with_the_number_of_layers(level, precision):
    """But scales and partial sums of a few bytes; what the host has of shared states is half of all."""
    plans = [plan_at(level, DEEP, PRECISIONS[precision], config=replace(CONFIG, num_layers=n)) for n in (4, 6, 8)]
    tables = [{**plan.table(), "Other": 0, "Activations": 0} for plan in plans]
    assert tables[0] == tables[1] == tables[2]
    for name, program in plans[1].programs.items():
        scales = 2 * 1024 if plans[1].spec.precision.scaling == "current" else 0  # that are kept of two layers more
        assert 0 <= plans[2].programs[name].live_bytes["device"] - program.live_bytes["device"] <= scales, name
    assert plans[2].arena_bytes() <= 1.05 * plans[1].arena_bytes(), "but for gaps"
    host = [plan.host_bytes for plan in plans]
    assert host[0] < host[1] < host[2]


@pytest.mark.parametrize("precision", ["bf16", "fp8-e4m3-delayed"])
def test_the_host_has_less_at_every_level(precision):
    tables = [plan_at(level, DEEP, PRECISIONS[precision], size=4).table("host") for level in LEVELS]
    held = {name: [table[name] for table in tables] for name in ("Gradients", "Weights", "Adam M")}
    assert held["Gradients"][0] == held["Gradients"][1] > 3 * held["Gradients"][2] == 3 * held["Gradients"][3]
    assert held["Adam M"][0] > 3 * held["Adam M"][1]
    assert held["Weights"][2] > 3 * held["Weights"][3]


def test_weights_that_are_gathered_go_to_the_host_once_in_a_step():
    """The first forward pass uses them as they are gathered; later ones fetch them."""
    plan = plan_at(1, Memory(host=("weight", "master")))
    layers = [row for row in plan.rows if row.layer is not None]
    found = {
        name: [sum(call.op == op for call in program.calls) for op in ("all_gather", "copy_to_host", "copy_to_device")]
        for name, program in plan.programs.items()
    }
    num, rows = len(layers), len(plan.rows)
    matrices = [row for row in layers if len(row.shape) == 2]
    assert found["first"][:2] == [rows, num] and found["gather"] == [rows, num, num]
    assert found["middle"][:2] == [0, 0] and found["middle"][2] >= num + len(matrices)
    assert found["first"][2] == found["middle"][2], "shares on the way forward in place of the whole"
    assert {call.lane for call in plan.programs["gather"].calls} == {"main"}


@pytest.mark.parametrize("level", [1, 3])
def test_the_collectives_of_a_layer_stand_together(level):
    """So that they are one for NCCL: what comes from the host, or goes there, is not between them."""
    plan = plan_at(level, DEEP, FP8["e4m3", "delayed"])
    layer = sum(row.layer == 0 for row in plan.rows)
    runs = [len([*run]) for op, run in groupby(c.op for c in plan.programs["only"].calls) if op == "all_gather"]
    assert runs == ([1, layer, layer, 1] if level == 1 else [1, layer, layer, 2, layer, layer])


@pytest.mark.parametrize("level", LEVELS)
def test_all_ranks_make_the_same_calls(level):
    def calls(rank):
        plan = plan_of(FP8_HEAD, DEEP, CONFIG, sharding=Sharding(rank, 5, **LEVELS[level]))
        return {name: [(c.op, c.lane, c.waits) for c in program.calls] for name, program in plan.programs.items()}

    assert calls(0) == calls(4)


@pytest.mark.parametrize("level", [1, *(pytest.param(level, marks=SLOW) for level in (0, 2, 3))])
@pytest.mark.parametrize("master", ["bf16", pytest.param("fp32", marks=SLOW)])
@pytest.mark.parametrize("flags", [pytest.param((), marks=SLOW), ("recompute_block",)], ids=["kept", "recomputed"])
def test_errors_of_copies_are_measured_of_what_is_fetched(level, master, flags):
    """Once each, also where backward fetches them again."""

    def work(world, memory):
        sharding = Sharding(world.rank, world.size, **LEVELS[level])
        plan = plan_of(replace(FP8_HEAD, master=master), memory, CONFIG, sharding=sharding, observe=True)
        return engine_of(plan, backend=HostBackend(world=world)).observe(rank_batch(Run(), 1, 0, world.rank)).tobytes()

    plain, hosted = (
        run_ranks(2, lambda world, memory=memory: work(world, memory))
        for memory in (Memory(flags), replace(HOSTED, flags=flags))
    )
    assert plain == hosted
