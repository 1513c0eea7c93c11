"""The rotary table: its layout, precision and the scaled kinds; transformers as the judge of the frequencies."""

import dataclasses

import numpy as np
import pytest
from tiny_engines import plan_of, result_of, tiny

from llmq.model.rope import attention_factor, frequencies, rope_table
from llmq.model.rope_keys import ROPE_KEYS, RopeConfig

LLAMA3 = RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)


def test_the_table_holds_cosines_then_sines():
    table = rope_table(RopeConfig(theta=100.0), 4, 3, np.float64)
    angles = np.arange(3)[:, None] * [1.0, 0.1]
    np.testing.assert_allclose(table, np.concatenate([np.cos(angles), np.sin(angles)], axis=1), atol=1e-15)


@pytest.mark.slow
def test_a_far_position_is_exact_to_the_rounding_of_the_table():
    """Angles in f32 would be off by 0.004 at position 100000; the table is computed in f64 and rounded once."""
    table = rope_table(RopeConfig(), 64, 100001, np.float32)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table[-1, 0], np.cos(100000.0), rtol=2**-24)


def test_linear_scaling_is_a_division_of_positions():
    plain, scaled = RopeConfig(), RopeConfig(kind="linear", factor=4.0)
    np.testing.assert_allclose(
        rope_table(scaled, 8, 17, np.float64)[::4], rope_table(plain, 8, 5, np.float64), atol=1e-14
    )


def test_llama3_keeps_fast_divides_slow_and_blends_between():
    plain = frequencies(dataclasses.replace(LLAMA3, kind="default"), 128, 1)
    ratio = plain / frequencies(LLAMA3, 128, 1)
    turns = 8192 * plain / (2 * np.pi)
    assert (ratio[turns > 4] == 1).all()
    np.testing.assert_allclose(ratio[turns < 1], 32, rtol=1e-15)
    between = ratio[(turns > 1) & (turns < 4)]
    assert between.size
    assert ((between > 1) & (between < 32)).all()


def test_channels_that_are_not_turned_are_the_last_of_each_half():
    table = rope_table(RopeConfig(100.0, partial=0.5), 8, 3, np.float64)
    turned = rope_table(RopeConfig(100.0), 4, 3, np.float64)
    np.testing.assert_array_equal(table[:, [0, 1, 4, 5]], turned)
    np.testing.assert_array_equal(table[:, [2, 3, 6, 7]], [[1, 1, 0, 0]] * 3)


FACTORS = {"short_factor": tuple(1 + i / 7 for i in range(64)), "long_factor": tuple(2 + i / 3 for i in range(64))}
KINDS = {
    "default": RopeConfig(),
    "linear": RopeConfig(kind="linear", factor=4.0),
    "llama3": LLAMA3,
    "dynamic": RopeConfig(kind="dynamic", factor=3.0, original_max_position=64),
    "yarn": RopeConfig(5e5, "yarn", 8.0, original_max_position=64),
    "yarn of its own": RopeConfig(
        1e4, "yarn", 8.0, original_max_position=4096, beta_fast=20, beta_slow=2, truncate=False
    ),
    "yarn with a factor": RopeConfig(1e4, "yarn", 4.0, original_max_position=4096, attention_factor=1.5),
    "yarn with mscale": RopeConfig(1e4, "yarn", 40.0, original_max_position=64, mscale=0.9, mscale_all_dim=0.7),
    "longrope": RopeConfig(kind="longrope", factor=32.0, original_max_position=64, **FACTORS),
    "longrope with a factor": RopeConfig(
        kind="longrope", factor=0.5, original_max_position=64, attention_factor=1.2, **FACTORS
    ),
}


@pytest.mark.judge
@pytest.mark.parametrize("length", [64, 100])
@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in KINDS.items()])
def test_transformers_agrees(config, length):
    """transformers works in f32, so its frequencies are right to a few units of 2^-24, and those of angles are as many
    times larger as there are radians."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    keys = ROPE_KEYS[config.kind].written(config)
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128, "max_position_embeddings": 64}
    hf = transformers.LlamaConfig(**sizes, rope_parameters=keys)
    rope = llama.LlamaRotaryEmbedding(hf)
    cos, sin = rope(torch.zeros(1), torch.arange(length)[None])
    np.testing.assert_allclose(frequencies(config, 128, length), rope.inv_freq.numpy(), rtol=16 * 2**-24)
    table = rope_table(config, 128, length, np.float64)
    theirs = np.concatenate([cos[0, :, :64].numpy(), sin[0, :, :64].numpy()], axis=1)
    np.testing.assert_allclose(table, theirs, atol=length * 16 * 2**-24)
    assert attention_factor(config) == pytest.approx(rope.attention_scaling, rel=1e-12)


def test_kinds_that_change_with_the_length_say_where():
    longrope, dynamic = KINDS["longrope"], KINDS["dynamic"]
    assert "short factors (longrope): rows have 64 tokens, at most 64" in longrope.changes_at(64)
    assert "long factors (longrope): rows have 65 tokens, more than 64" in longrope.changes_at(65)
    assert dynamic.changes_at(64) is None and "larger base (dynamic): rows have 65" in dynamic.changes_at(65)
    assert KINDS["yarn"].changes_at(10**6) is None


def test_layers_with_a_window_turn_by_a_table_of_their_own():
    """As a model does that has no other one; only tables that are read are made."""
    ropes = {"rope": RopeConfig(5e5), "local_rope": RopeConfig(77.0)}
    local, alone = tiny(windows=(5, 5), **ropes), tiny(windows=(5, 5), rope=RopeConfig(77.0))
    found, wanted = (result_of(plan_of(config=config)) for config in (local, alone))
    assert found == wanted

    def tables(config):
        return {name for name in plan_of(config=config).persistent if name.startswith("const:")}

    assert tables(local) == {"const:rope_local"} and tables(alone) == {"const:rope"}
    assert tables(tiny(windows=(5, None), **ropes)) == {"const:rope_local", "const:rope"}
    mixed = tiny(windows=(5, None), unrotated=(1,), **ropes)
    assert tables(mixed) == {"const:rope_local", "const:rope_none"}
    assert {"local_rope", "unrotated"} <= mixed.identity().keys() and not {"local_rope"} & alone.identity().keys()
