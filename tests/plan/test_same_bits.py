"""What only moves or repeats work changes no bit: settings of memory with precisions and optimizers, of one rank and of
many, with updates in backward, and random combinations of them."""

import random
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest
import ranks
from in_process import run_ranks
from random_plans import AnyOrder, drawn
from ranks import LEVELS, Run, on_ranks, rank_batch, same, train
from tiny_engines import (
    BF16,
    FP8,
    FP8_HEAD,
    FP32,
    PRECISIONS,
    B,
    engine_of,
    fused_result_of,
    plan_of,
    result_of,
    streams,
    tiny,
)

from llmq.adapters.lora import Lora
from llmq.adapters.targets import chosen, targets
from llmq.backends.host import HostBackend
from llmq.model.optimizer import Hyperparameters
from llmq.optimizers.rule import spaces
from llmq.optimizers.sgd import Sgd
from llmq.plan.memory import RESIDUAL, ROLES, Memory
from llmq.stores.sharding import Sharding
from llmq.tensor import Form

SLOW, SWEEP = pytest.mark.slow, pytest.mark.sweep
SIZES = {"vocab_size": 300, "intermediate_size": 176}  # matrices of several tiles of 128 rows, the last one short
CONFIGS = (
    tiny(**SIZES),
    tiny(**SIZES, architecture="Qwen3ForCausalLM", qk_norm=True, qkv_bias=False, tie_embeddings=False),
)
WIDE, EIGHT = replace(BF16, master="fp32", v="fp32"), replace(BF16, m="int8", v="e4m3", master="fp32")
NONE = {
    "fp32": replace(FP32, master="none"),
    "8 bits": replace(EIGHT, master="none"),
    **{
        scaling: replace(FP8["e4m3", scaling], master="none")
        for scaling in ("delayed", "current", "rowwise", "blockwise")
    },
}
ADAM = Hyperparameters()
RULES = {  # what is computed: precision and optimizer
    **{name: (precision, ADAM) for name, precision in PRECISIONS.items()},
    "wide": (WIDE, ADAM),
    "wide states of fp8": (replace(FP8["e5m2", "delayed"], m="fp32", v="bf16", master="fp32"), ADAM),
    "8 bits": (EIGHT, ADAM),
    **{f"no masters, {name}": (precision, ADAM) for name, precision in NONE.items()},
    "momentum": (WIDE, Hyperparameters(Sgd(momentum=0.9, nesterov=True, weight_decay=0.1), grad_clip=0.5)),
    "sgd": (WIDE, Hyperparameters(Sgd())),
}

BLOCK, STATES = ("recompute_block",), ("master", "m", "v")
ALL = (*STATES, "grad", "weight")
REMADE, TILED = Memory(persistent_quants=False), Memory(seq_tiles=2)
MEMORIES = {
    **{flag: Memory((flag,)) for flag in ROLES},
    "chunks": Memory(attention_chunks=B),
    "slots": Memory(offload=(*streams(tiny()), "0/0.mlp.gate_up", "0/1.mlp.x", "0/1.mlp.act", "0/0.attention.att")),
    "streams": Memory(BLOCK, offload=streams(tiny())),
    "residuals": Memory(offload=(RESIDUAL,)),
    "residuals, recomputed": Memory(BLOCK, offload=(RESIDUAL,)),
    "residuals, states": Memory(("recompute_ffn",), offload=(RESIDUAL,), host=STATES),
    "a moment": Memory(host=("m",), piece_bytes=1),
    "moments": Memory(host=("m", "v"), piece_bytes=1),
    "states": Memory(host=STATES),
    "pieces of states": Memory(host=STATES, piece_bytes=1),
    "gradients": Memory(host=("grad",), piece_bytes=1),
    "quants": Memory(host=("quant",), piece_bytes=1),
    "weights": Memory(host=("weight", "master"), piece_bytes=1),
    "all": Memory(host=ALL, piece_bytes=1),
    "all, recomputed": Memory(BLOCK, offload=(RESIDUAL,), host=ALL),
    "moments in place": Memory(host=("m", "v"), zero_copy=True),
    "states in place": Memory(host=STATES, zero_copy=True),
    "gradients in place": Memory(host=(*STATES, "grad"), zero_copy=True),
    "all in place": Memory(BLOCK, offload=(RESIDUAL,), host=ALL, zero_copy=True, write_combined=True),
    "remade": REMADE,
    "remade, recomputed": replace(REMADE, flags=BLOCK, offload=(RESIDUAL,)),
    "remade, states": replace(REMADE, host=(*STATES, "grad"), piece_bytes=1),
    "remade in place": replace(REMADE, host=STATES, zero_copy=True),
    "remade, streamed": replace(REMADE, host=("master", "weight")),
    "tiles, recomputed": replace(TILED, flags=BLOCK),
    "tiles, flags": replace(TILED, flags=("recompute_ffn", "recompute_norm")),
    "tiles, moments": replace(TILED, flags=BLOCK, offload=(RESIDUAL,), host=("m", "v")),
}


def is_possible(rule, memory):
    """Whether one is not refused with the other."""
    precision, hyper = RULES[rule]
    if precision.master == "none" and ({"master", "weight", "quant"} & {*memory.host} or not memory.persistent_quants):
        return False
    return (precision.scaling != "blockwise" or memory.seq_tiles == 1) and {"m", "v"} & {*memory.host} <= {
        *spaces(hyper.rule)
    }


def is_possible_in_backward(rule, memory):
    """Delayed scales and what an accumulated gradient would need are known at the end of a step."""
    precision, _ = RULES[rule]
    delayed = "e4m3" in (precision.matmul, precision.head) and precision.scaling == "delayed"
    return is_possible(rule, memory) and not delayed and "grad" not in memory.host


def cases(is_possible):
    """Each setting with two or three rules, which take turns; with the others in the sweep."""
    every = product(enumerate(RULES), enumerate(MEMORIES.items()))
    return pytest.mark.parametrize(
        ("rule", "memory"),
        [
            pytest.param(rule, name, marks=SWEEP if (number + other) % 9 else ())
            for (number, rule), (other, (name, memory)) in every
            if is_possible(rule, memory)
        ],
    )


@cache
def run_of(precision, memory, config, hyper=ADAM):
    """Two steps of three micro-steps: the first overwrites gradients, the others add to them."""
    return result_of(plan_of(precision, memory, config, hyper), accumulation=3)


@cache
def fused_run_of(precision, memory, config, hyper):
    return fused_result_of(plan_of(precision, memory, config, hyper))


def plain(memory):
    """Without what moves or repeats work; tiles and chunks of the head have an order of sums of their own."""
    return Memory(head_chunks=memory.head_chunks, seq_tiles=memory.seq_tiles)


def config_of(rule, memory):
    """Each of the two for half of all."""
    return CONFIGS[([*RULES].index(rule) + [*MEMORIES].index(memory)) % 2]


@pytest.mark.quick(
    "*-recompute_[!s]*",
    "*-chunks",
    "*-slots",
    "*-streams",
    "*-residuals",
    "*-quants",
    "*-weights",
    "*-all, recomputed",
    "*-all in place",
    "*-remade, streamed",
    "*-tiles, recomputed",
)
@pytest.mark.sample
@cases(is_possible)
def test_a_setting_changes_no_bit(rule, memory):
    (precision, hyper), config, memory = RULES[rule], config_of(rule, memory), MEMORIES[memory]
    found = result_of(plan_of(precision, memory, config, hyper), accumulation=3)
    assert found == run_of(precision, plain(memory), config, hyper)


@pytest.mark.quick("*-recompute_ffn", "*-chunks", "*-streams", "*-states", "*-weights", "*-tiles, recomputed")
@pytest.mark.sample
@cases(is_possible_in_backward)
def test_an_update_in_backward_changes_no_bit(rule, memory):
    (precision, hyper), config, memory = RULES[rule], config_of(rule, memory), MEMORIES[memory]
    hyper = replace(hyper, grad_clip=0.5, clips_by_last=True)
    expected = fused_run_of(precision, plain(memory), config, hyper)
    assert fused_result_of(plan_of(precision, replace(memory, fused=True), config, hyper)) == expected
    assert expected[0][1].norm > hyper.grad_clip, "the last norm is above the clip"


@pytest.mark.slow
@pytest.mark.parametrize(
    "scaling", ["delayed", "blockwise", *(pytest.param(name, marks=SWEEP) for name in ("none", "rowwise"))]
)
def test_every_combination_of_flags_changes_no_bit(scaling):
    """All are planned, and each plan is run once: where one flag drops what another does too, several have the same."""
    precision, seen = FP8.get(("e4m3", scaling), BF16), []
    for count in range(2, len(ROLES) + 1):
        for flags in combinations(ROLES, count):
            plan = plan_of(precision, Memory(flags), CONFIGS[0])
            if plan.programs not in seen:
                seen.append(plan.programs)
                assert result_of(plan, accumulation=3) == run_of(precision, Memory(), CONFIGS[0]), flags


@pytest.mark.parametrize("precision", [BF16, pytest.param(FP8["e5m2", "delayed"], marks=SLOW)])
def test_random_drop_sets_change_no_bit(precision):
    config = CONFIGS[1]
    names = sorted({name for name, _ in plan_of(precision, None, config).fates.kept})
    # only what a layer makes for itself can be made again from the stream that enters it
    names = [name for name in names if not name.endswith("attention.res") and name.split("/")[1][0].isdigit()]
    for seed in range(3):
        drop = tuple(random.Random(seed).sample(names, random.Random(seed).randint(1, len(names))))
        assert run_of(precision, Memory(drop=drop), config) == run_of(precision, Memory(), config), drop


@SLOW
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=SWEEP) for seed in range(6, 30))])
def test_random_combinations_in_backward_change_no_bit(seed):
    precision, known, moved = drawn(seed)
    if precision.scaling == "delayed":
        precision = replace(precision, scaling="current")
    moved = replace(moved, fused=True, host=tuple(space for space in moved.host if space != "grad"))
    if seed % 2 and moved.persistent_quants and not {"master", "weight", "quant"} & {*moved.host}:
        precision = replace(precision, master="none")
    hyper = Hyperparameters(grad_clip=0.5, clips_by_last=True)
    one, other = (fused_result_of(plan_of(precision, memory, CONFIGS[0], hyper), 2) for memory in (known, moved))
    assert one == other


# Many ranks


COMPRESSED = {"all_to_all": True, "compressed": Form("e4m3", "row", "tilewise")}
_TARGETS = targets(chosen("q_proj,v_proj,mlp", ranks.CONFIG), 4, 8.0, rslora=False)
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
    "compressed": Run(how=COMPRESSED, micro_steps=2),
    "adapters": Run(more={"adapters": Lora(4, 8.0, _TARGETS, base="e4m3")}, micro_steps=2),
    "shard-weights": Run(micro_steps=3, how={"weights": True}),  # between two levels
    "shard-gradients": Run(micro_steps=3, how={"gradients": True}),
    "fp8, shard-weights": Run(FP8_HEAD, micro_steps=2, how={"weights": True}),
    "fp8, shard-gradients": Run(FP8_HEAD, micro_steps=2, how={"gradients": True}),
}
OF_RANKS = (
    "gradients",
    "weights",
    "quants",
    "all",
    "all, recomputed",
    "residuals, states",
    "states in place",
    "remade",
)


@cache
def ranks_of(name, level, tiles, size):
    """What ranks find with everything on the device."""
    return on_ranks(replace(RUNS[name], level=level, memory=Memory(seq_tiles=tiles)), size)


def cases_of_ranks():
    """Each run at one level with one setting, which take turns; at all levels with all settings in the sweep."""
    for (number, name), level, memory, size in product(enumerate(RUNS), LEVELS, OF_RANKS, (2, 3)):
        is_sharded = "shard" in name
        if (is_sharded and level != 1) or (memory == "remade" and level):  # no rank has all masters
            continue
        turn = (1 if is_sharded else (number + number // 4) % 4, OF_RANKS[number % len(OF_RANKS)], 2)
        marks = () if (level, memory, size) == turn else SWEEP
        yield pytest.param(name, level, memory, size, id=f"{name}-{level}-{memory}-{size}", marks=marks)


@pytest.mark.quick("int8-3-states in place-2", "shard-gradients-1-all, recomputed-2")
@pytest.mark.parametrize(("name", "level", "memory", "size"), [*cases_of_ranks()])
def test_a_setting_changes_no_bit_of_any_rank(name, level, memory, size):
    """Results, and parameters."""
    memory = MEMORIES[memory]
    found = on_ranks(replace(RUNS[name], level=level, memory=memory), size)
    assert all(map(same, found, ranks_of(name, level, memory.seq_tiles, size)))


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=SLOW if n < 10 else SWEEP) for n in range(1, 40))])
def test_random_combinations_in_any_order_change_no_bit(seed):
    """Of flags, levels, numbers of ranks and micro-steps, and ways of summing; each rank runs its calls in an order of
    its own that lanes and waits allow, with poisoned arenas."""
    draw, (precision, known, moved) = random.Random(seed), drawn(seed)
    how = draw.choice([{}, {"all_to_all": True}, COMPRESSED])
    size = draw.choice([1, 2, 3])
    level = draw.choice([*LEVELS]) if size > 1 else 0
    moved = replace(moved, persistent_quants=moved.persistent_quants or level > 0)  # else no rank has all masters
    run = Run(precision, level, known, micro_steps=draw.choice([1, 2, 3]), how=how if size > 1 else {})
    ordered = run_ranks(size, lambda world: train(replace(run, memory=moved), world, AnyOrder(seed, world)))
    assert all(map(same, ordered, on_ranks(run, size)))


@pytest.mark.quick("None-remade, states-bf16", "1-all, recomputed-fp32", "3-all-bf16")
@pytest.mark.sample("sweep")
@pytest.mark.parametrize(
    ("level", "memory", "master"),
    [
        *product([None, *LEVELS], ["all", "all, recomputed"], ["bf16", "fp32"]),
        *product([None, 0], ["remade", "remade, states"], ["bf16"]),
    ],
)
def test_errors_of_copies_are_measured_of_what_is_fetched(level, memory, master):
    """Once each, also where backward fetches them again, on one rank (None) and on two."""
    memory = MEMORIES[memory]

    def work(world, memory):
        sharding = Sharding() if level is None else Sharding(world.rank, world.size, **LEVELS[level])
        plan = plan_of(replace(FP8_HEAD, master=master), memory, ranks.CONFIG, sharding=sharding, observe=True)
        return engine_of(plan, backend=HostBackend(world=world)).observe(rank_batch(Run(), 1, 0, world.rank)).tobytes()

    size = 1 if level is None else 2
    one, other = (run_ranks(size, lambda world, m=m: work(world, m)) for m in (Memory(memory.flags), memory))
    assert one == other and np.frombuffer(one[0], np.uint8).any()
