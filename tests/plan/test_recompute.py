"""Recompute: every flag, every combination and random drop sets give the same bits and free exactly what they drop."""

import itertools
import random
from dataclasses import replace

import pytest
from tiny_engines import BF16, FP8, PRECISIONS, bits, engine_of, plan_of, tiny, train_steps

from llmq.errors import UsageError
from llmq.model.presets import preset
from llmq.plan.arena import aligned
from llmq.plan.memory import ROLES, Memory

FLAGS = tuple(ROLES)
CONFIGS = {
    "qwen2": tiny(),
    "qwen3": tiny(architecture="Qwen3ForCausalLM", qk_norm=True, qkv_bias=False, tie_embeddings=False),
}


def result_of(plan):
    """Losses and bits of a step of two micro-steps."""
    engine = engine_of(plan)
    return train_steps(engine, steps=1), bits(engine)


FAST = {("bf16", "qwen2"), ("fp8-e5m2-blockwise", "qwen3")}
CASES = [  # every precision with one of the configs, and the fast ones
    pytest.param(precision, config, id=f"{p}-{c}", marks=[] if (p, c) in FAST else pytest.mark.slow)
    for at, (p, precision) in enumerate(PRECISIONS.items())
    for number, (c, config) in enumerate(CONFIGS.items())
    if (p, c) in FAST or at % 2 == number
]


@pytest.mark.parametrize(("precision", "config"), CASES)
def test_each_flag_is_bit_equal_and_frees_memory(precision, config):
    plan = plan_of(precision, Memory(), config)
    plain = result_of(plan)
    for flag in FLAGS:
        small = plan_of(precision, Memory((flag,)), config)
        assert result_of(small) == plain, flag
        assert sum(small.kept.values()) < sum(plan.kept.values()), flag


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["none", "delayed", "rowwise", "blockwise"])
def test_every_combination_of_flags_is_bit_equal(scaling):
    """All are planned, and each plan is run once: where one flag drops what another does too, several have the same."""
    precision = FP8.get(("e4m3", scaling), BF16)
    plain, seen = result_of(plan_of(precision, Memory(), tiny())), []
    for count in range(2, len(FLAGS) + 1):
        for flags in itertools.combinations(FLAGS, count):
            plan = plan_of(precision, Memory(flags), tiny())
            if plan.programs not in seen:
                seen.append(plan.programs)
                assert result_of(plan) == plain, flags


@pytest.mark.parametrize("precision", [BF16, pytest.param(FP8["e5m2", "delayed"], marks=pytest.mark.slow)])
def test_random_drop_sets_are_bit_equal(precision):
    config = CONFIGS["qwen3"]
    plan = plan_of(precision, Memory(), config)
    plain, names = result_of(plan), sorted({name for name, _ in plan.fates.kept})
    # only what a layer makes for itself can be made again from the stream that enters it
    names = [name for name in names if not name.endswith("attention.res") and name.split("/")[1][0].isdigit()]
    for seed in range(3):
        drop = random.Random(seed).sample(names, random.Random(seed).randint(1, len(names)))
        assert result_of(plan_of(precision, Memory(drop=tuple(drop)), config)) == plain, drop


def test_planned_bytes_fall_by_exactly_the_bytes_of_the_dropped_slots():
    plain = plan_of(BF16).kept
    b, t, c, f = 2, 16, 48, 64
    sizes = {"act": 2 * b * t * f, "gate_up": 2 * b * t * 2 * f, "x": 2 * b * t * c}
    for flag, slots in {
        "recompute_swiglu": ["act"],
        "recompute_ffn": ["act", "gate_up"],
        "recompute_norm": ["x", "x"],
    }.items():
        freed = sum(plain.values()) - sum(plan_of(BF16, Memory((flag,))).kept.values())
        assert freed == 2 * sum(aligned(sizes[slot]) for slot in slots), flag  # two layers


def test_only_the_stream_entering_a_block_is_kept_with_recompute_block():
    kept = plan_of(BF16, Memory(("recompute_block",))).kept
    assert all(name.endswith("attention.res") for name in kept)


def test_recompute_block_needs_a_quarter_of_the_activations_of_qwen_05b():
    config = replace(preset("Qwen2.5-0.5B"), num_layers=8)
    big = {"batch_size": 8, "seq_len": 1024}
    plain = plan_of(BF16, Memory((), head_chunks=4), config, **big)
    block = plan_of(BF16, Memory(("recompute_block",), head_chunks=4), config, **big)
    assert block.arena_bytes() <= 0.25 * plain.arena_bytes()
    assert plain.arena_bytes() <= 1.05 * max(program.live_bytes["device"] for program in plain.programs.values())


def test_an_fp8_site_keeps_its_quantized_copy_and_not_the_value():
    kept = {name for name in plan_of(FP8["e4m3", "delayed"]).kept if "mlp.x" in name or "mlp.act" in name}
    assert kept and all(name.endswith("@e4m3/col/delayed") for name in kept)


def test_a_copy_is_not_kept_beside_its_value():
    # attention's backward reads its output's value, so the copy that wgrad reads is cast again
    kept = {name for name in plan_of(FP8["e4m3", "delayed"]).kept if "attention.att" in name}
    assert kept == {"0/0.attention.att", "0/1.attention.att"}


def test_a_flag_that_frees_nothing_is_an_error(monkeypatch):
    monkeypatch.setitem(ROLES, "recompute_swiglu", frozenset({"nobody's role"}))
    with pytest.raises(UsageError, match="--recompute-swiglu frees no memory"):
        plan_of(BF16, Memory(("recompute_swiglu",)))
