"""Speed of light, by hand for Qwen2.5-0.5B."""

from dataclasses import replace

import pytest

from llmq.adapters.lora import Lora
from llmq.adapters.targets import chosen, targets
from llmq.model import speed_of_light as sol
from llmq.model.config import ModelConfig
from llmq.model.optimizer import Hyperparameters
from llmq.model.parameters import linear_maps, parameter_rows
from llmq.plan.memory import Memory
from llmq.plan.precision import Precision
from llmq.plan.spec import Spec

QWEN = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    max_position=32768,
    tie_embeddings=True,
    qkv_bias=True,
)
H200 = {"bf16": 989.4e12, "e4m3": 1978.9e12}
# Per layer: qkv 896 * (896 + 2 * 128) = 1,032,192; o 896 * 896 = 802,816; MLP 3 * 896 * 4864 = 13,074,432.
BLOCKS = 24 * (1_032_192 + 802_816 + 13_074_432)
HEAD = 136_134_656  # 151936 * 896
ATTENTION = 22_020_096  # 24 * 14 * 64 * 1024


def test_linear_maps_are_the_matrices_of_the_parameter_table():
    for config in (QWEN, replace(QWEN, head_dim=128, num_heads=16, num_kv_heads=8, qk_norm=True)):
        matrices = [row for row in parameter_rows(config) if row.layer is not None and len(row.shape) == 2]
        maps = linear_maps(config)
        assert list(maps)[-1] == "head" and maps.pop("head") == HEAD
        assert sum(maps.values()) == sum(row.shape[0] * row.shape[1] for row in matrices)
    maps = linear_maps(QWEN)
    assert sum(maps.values()) == BLOCKS + HEAD and len(maps) == 4 * 24 + 1


WIDE = 896 * 896 + 896 * 4864  # layers.0.attention.o and layers.23.mlp.down
MIXED = Precision("bf16", "e4m3", wide=("layers.0.attention.o", "layers.23.mlp.down"))
PLAIN = Precision("bf16", "bf16", head="bf16")


@pytest.mark.parametrize(
    ("precision", "length", "in_e4m3", "in_bf16"),
    [
        (PLAIN, 1024, 0, BLOCKS + HEAD + ATTENTION),
        (Precision("bf16", "e4m3", head="bf16"), 1024, BLOCKS, HEAD + ATTENTION),
        (MIXED, 1024, BLOCKS - WIDE, WIDE + HEAD + ATTENTION),
        (Precision("bf16", "e4m3", head="e4m3"), 1024, BLOCKS + HEAD, ATTENTION),
        (Precision("bf16", "e4m3", head="e4m3"), 4096, BLOCKS + HEAD, 4 * ATTENTION),
    ],
)
def test_a_weight_counts_6_at_the_rate_of_its_dtype(precision, length, in_e4m3, in_bf16):
    seconds = sol.seconds_per_token(QWEN, length, H200, precision.dtype)
    assert seconds == pytest.approx(6 * in_e4m3 / 1978.9e12 + 6 * in_bf16 / 989.4e12, rel=1e-12)


def test_a_token_in_bf16():
    """3.0959 GFLOP a token: 319,585 tokens/s on one H200, of which 156,000 are 48.8%."""
    seconds = sol.seconds_per_token(QWEN, 1024, H200, PLAIN.dtype)
    assert 1 / seconds == pytest.approx(319_585, rel=1e-5) and 156_000 * seconds == pytest.approx(0.48813, rel=1e-4)


def test_a_frozen_weight_counts_4_and_an_adapters_6():
    """Rank 16 on all maps of the layers: 16 (inputs + outputs) of each."""
    modules = chosen("all", QWEN)
    adapters = Lora(16, 32.0, targets(modules, 16, 32.0, rslora=False))
    trained = 24 * 16 * (4 * 896 + 896 + 2 * 128 + 896 + 3 * (896 + 4864))
    dtypes = Precision("bf16", "e4m3", head="bf16", master="fp32", m="fp32", v="fp32")
    seconds = Spec(QWEN, dtypes, Memory(), Hyperparameters(), 1, 1024, adapters=adapters).light_s(H200)
    frozen = 4 * BLOCKS / 1978.9e12 + 4 * HEAD / 989.4e12
    assert seconds == pytest.approx(frozen + 6 * (trained + ATTENTION) / 989.4e12, rel=1e-12)
    is_frozen = {"embed.weight"}.__contains__
    some = sol.seconds_per_token(QWEN, 1024, H200, Precision("bf16", "bf16").dtype, is_frozen=is_frozen)
    assert some == pytest.approx((6 * (BLOCKS + ATTENTION) + 4 * HEAD) / 989.4e12, rel=1e-12)
