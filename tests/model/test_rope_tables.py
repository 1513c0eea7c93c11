"""The rotary table: its layout, precision and the scaled kinds; transformers as the judge of the frequencies."""

import dataclasses

import numpy as np
import pytest

from llmq.model.config import RopeConfig
from llmq.model.rope import frequencies, rope_table

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
    plain = frequencies(dataclasses.replace(LLAMA3, kind="default"), 128)
    ratio = plain / frequencies(LLAMA3, 128)
    turns = 8192 * plain / (2 * np.pi)
    assert (ratio[turns > 4] == 1).all()
    np.testing.assert_allclose(ratio[turns < 1], 32, rtol=1e-15)
    between = ratio[(turns > 1) & (turns < 4)]
    assert between.size
    assert ((between > 1) & (between < 32)).all()


@pytest.mark.judge
@pytest.mark.parametrize(
    "config", [RopeConfig(), RopeConfig(kind="linear", factor=4.0), LLAMA3], ids=lambda config: config.kind
)
def test_transformers_agrees(config):
    """transformers works in f32, so its frequencies are right to a few units of 2^-24."""
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    scaling = {
        "rope_type": config.kind,
        "factor": config.factor,
        "low_freq_factor": config.low_freq_factor,
        "high_freq_factor": config.high_freq_factor,
        "original_max_position_embeddings": config.original_max_position,
    }
    parameters = {"rope_theta": config.theta, **(scaling if config.kind != "default" else {"rope_type": "default"})}
    hf = transformers.LlamaConfig(hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters=parameters)
    inv_freq = llama.LlamaRotaryEmbedding(hf).inv_freq.numpy()
    np.testing.assert_allclose(frequencies(config, 128), inv_freq, rtol=8 * 2**-24)
