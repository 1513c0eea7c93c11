"""Recompute: flags free exactly what they drop."""

from dataclasses import replace

import pytest
from tiny_engines import BF16, FP8, PRECISIONS, plan_of, tiny

from llmq.errors import UsageError
from llmq.model.presets import preset
from llmq.plan.arena import aligned
from llmq.plan.memory import ROLES, Memory


@pytest.mark.quick("bf16", "fp8-e4m3-delayed")
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_each_flag_frees_memory(precision):
    for config in (tiny(), tiny(architecture="Qwen3ForCausalLM", qk_norm=True, qkv_bias=False, tie_embeddings=False)):
        plain = plan_of(precision, None, config)
        for flag in ROLES:
            assert sum(plan_of(precision, Memory((flag,)), config).kept.values()) < sum(plain.kept.values()), flag


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
    monkeypatch.setitem(ROLES, "recompute_swiglu", frozenset({"no role"}))
    with pytest.raises(UsageError, match="--recompute-swiglu frees no memory"):
        plan_of(BF16, Memory(("recompute_swiglu",)))
