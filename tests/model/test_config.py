"""config.json in both spellings: what is read, what is refused, and that what is written reads back the same."""

import copy
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmq.errors import DataError, LlmqError, UsageError
from llmq.model.config import FAMILIES, ModelConfig, RopeConfig, from_folder, read_config, to_hf
from llmq.model.families import LocalRopeKeys, Mistral
from llmq.model.parameters import num_parameters, parameter_rows
from llmq.model.presets import PRESETS, preset
from llmq.model.rope import frequencies
from llmq.model.rope_keys import parted
from llmq.model.wiring import Scales

CONFIGS = Path(__file__).parents[2] / "../shared/data/configs"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 32)


def refused(mapping, *texts):
    with pytest.raises(DataError) as caught:
        read_config(mapping)
    for text in texts:
        assert text in str(caught.value)


def test_llama_in_the_spelling_of_transformers_4():
    config = read_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE, "eos_token_id": [5, 7]})
    assert config == ModelConfig(
        "LlamaForCausalLM", 100, 32, 48, 3, 4, 2, 8, 1e-5, 64, LLAMA3, dtype="bf16", bos_token_id=1,
        eos_token_ids=(5, 7),
    )  # fmt: skip


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {"rope_theta": 5e5, **LLAMA3_ROPE}, "dtype": "bfloat16"},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE, "torch_dtype": "torch.bfloat16"},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"type" if k == "rope_type" else k: v for k, v in LLAMA3_ROPE.items()},
            "rope_parameters": {"rope_theta": 500000, **LLAMA3_ROPE},
            "torch_dtype": "bfloat16",
            "dtype": "bfloat16",
        },
    ],
)
def test_spellings_mean_the_same(spelling):
    plain = {k: v for k, v in LLAMA.items() if k != "torch_dtype"}
    config = read_config({**plain, **spelling})
    assert config.rope == LLAMA3 and config.dtype == "bf16"


def test_linear_rope_with_the_old_key():
    config = read_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4}})
    assert config.rope == RopeConfig(10000.0, "linear", 4.0)


@pytest.mark.parametrize(
    ("extra", "texts"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, ["base contradicts"]),
        ({"rope_scaling": LLAMA3_ROPE, "rope_parameters": {"rope_type": "default"}}, ["contradicts rope_scaling"]),
        ({"rope_scaling": {**LLAMA3_ROPE, "type": "linear"}}, ["rope_scaling", "type 'linear' contradicts"]),
        ({"dtype": "float32"}, ["dtype ('float32'): contradicts torch_dtype ('bfloat16')"]),
        ({"model_type": "mistral"}, ["model_type ('mistral'): contradicts"]),
    ],
)
def test_contradictions_are_errors(extra, texts):
    refused({**LLAMA, **extra}, *texts)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["Qwen3MoeForCausalLM"]), ("architectures", ["LlamaModel"]), ("architectures", "Llama"),
        ("model_type", "gemma"), ("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True),
        ("attention_dropout", 0.1), ("partial_rotary_factor", 0.5), ("quantization_config", {"quant_method": "gptq"}),
        ("final_logit_softcapping", 30.0), ("num_local_experts", 8), ("is_causal", False), ("vocab_size", 0),
        ("vocab_size", 2**40), ("hidden_size", "32"), ("num_hidden_layers", True), ("num_hidden_layers", 10**9),
        ("num_attention_heads", 3), ("num_key_value_heads", 3), ("head_dim", 7), ("intermediate_size", None),
        ("rms_norm_eps", 0), ("rms_norm_eps", float("nan")), ("rope_theta", -1), ("rope_theta", float("inf")),
        ("rope_scaling", "linear"), ("rope_parameters", [1]), ("tie_word_embeddings", "yes"), ("torch_dtype", "int8"),
        ("torch_dtype", 3), ("eos_token_id", "</s>"), ("eos_token_id", [1, None]), ("bos_token_id", 1.5),
        ("layer_types", ["full_attention"]), ("layer_types", ["full_attention", "chunked_attention", []]),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ],
)  # fmt: skip
def test_a_bad_or_unsupported_key_is_named_with_its_value(key, value):
    hint = "hidden_size" if (key, value) == ("num_attention_heads", 3) else key
    refused({**LLAMA, key: value}, hint, str(value)[:20])


@pytest.mark.parametrize(
    ("about", "base"),
    [
        *(({"quant_method": one, "bits": 4}, "nf4") for one in ("gptq", "awq", "bitnet")),
        *(
            ({"quant_method": "bitsandbytes", f"load_in_{bits}bit": True}, base)
            for bits, base in ((4, "nf4"), (8, "int8"))
        ),
        ({"quant_method": "fp8"}, "e4m3"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "compressed-tensors"}, "nf4, mxfp4, int8 or e4m3"),
        ("int4", "nf4, mxfp4, int8 or e4m3"),
    ],
)
def test_quantized_folders_name_the_options_that_train_on_such_a_model(about, base):
    refused({**LLAMA, "quantization_config": about}, "quantization_config", f"--lora-rank 16 --base-dtype {base}")


@pytest.mark.parametrize("kind", ["siglip_vision_model", "pixtral", "qwen2_5_vl_vision"])
def test_a_vision_tower_alone_is_refused_as_one(kind):
    tower = {"model_type": kind, "hidden_size": 32, "num_attention_heads": 4, "patch_size": 4}
    refused(tower, f"model_type ('{kind}'): is not supported: it is a vision tower alone, which has no language model")


@pytest.mark.parametrize("kind", ["proportional", "su", "mrope", None, 5, {}])
def test_other_rope_kinds_are_refused(kind):
    refused({**LLAMA, "rope_scaling": {"rope_type": kind, "factor": 2.0}}, f"rope_type {kind!r}", "llama3")


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("inner", [{}, {"original_max_position_embeddings": 32}], ids=["outer", "both"])
def test_the_original_length_of_the_top_level_counts(where, inner):
    """With transformers 5.23's frequencies for such a config.json."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **inner}
    config = read_config({**LLAMA, where: rope, "original_max_position_embeddings": 64})
    assert config.rope == RopeConfig(1e4, "llama3", 8.0, 1.0, 4.0, 64)
    theirs = [1.0, 0.244385, 0.013042, 0.003953, 0.00125, 0.000395, 0.000125, 0.00004]
    np.testing.assert_allclose(frequencies(config.rope, 16, 1), theirs, atol=5e-7)
    assert read_config(to_hf(config)) == config
    refused({**LLAMA, where: rope, "original_max_position_embeddings": 0}, "original_max_position_embeddings (0)")


@pytest.mark.parametrize("key", [k for k in LLAMA3_ROPE if k != "rope_type"])
def test_llama3_rope_needs_its_keys(key):
    refused({**LLAMA, "rope_scaling": {**LLAMA3_ROPE, key: 0}}, f"rope_scaling.{key} (0)")
    refused({**LLAMA, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != key}}, f"{key} (absent)")


LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2, 3], "long_factor": [2.0, 4.0, 8.0, 16.5]}


@pytest.mark.parametrize(
    ("rope", "found"),
    [
        ({"type": "yarn", "factor": 4.0}, RopeConfig(1e4, "yarn", 4.0, original_max_position=64)),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 16, "mscale": 1.0, "truncate": False},
            RopeConfig(1e4, "yarn", 4.0, original_max_position=16, mscale=1.0, truncate=False),
        ),
        ({"type": "dynamic", "factor": 2.0}, RopeConfig(1e4, "dynamic", 2.0, original_max_position=64)),
        (
            {**LONG, "original_max_position_embeddings": 32, "attention_factor": 1.25},
            RopeConfig(
                1e4, "longrope", 2.0, original_max_position=32, attention_factor=1.25,
                short_factor=(1.0, 1.5, 2.0, 3.0), long_factor=(2.0, 4.0, 8.0, 16.5),
            ),
        ),
    ],
    ids=["yarn", "yarn of its own", "dynamic", "longrope"],
)  # fmt: skip
def test_what_a_kind_of_rope_leaves_open_follows_from_the_lengths(rope, found):
    llama = {**LLAMA, "max_position_embeddings": 64}
    config = read_config({**llama, "rope_scaling": rope})
    assert config.rope == found == read_config({**llama, "rope_parameters": {**rope, "rope_theta": 1e4}}).rope
    written = to_hf(config)
    assert read_config(json.loads(json.dumps(written))) == config == read_config(to_hf(replace(config, source={})))
    assert {key: written["rope_parameters"][key] for key in rope if key != "type"} == {
        key: value for key, value in rope.items() if key != "type"
    }


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({**LONG, "long_factor": [1.0]}, "long_factor has 1 numbers, and heads have 4 frequencies"),
        ({**LONG, "short_factor": [1, 1, 1, 0]}, "must be greater than 0"),
        ({**LONG, "short_factor": None}, "short_factor (None): is needed"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "needs a rope_theta above 1"),
        ({"rope_type": "dynamic"}, "factor (absent): is needed"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial rotary embedding is not supported"),
    ],
)
def test_what_has_no_table_is_refused(rope, said):
    refused({**LLAMA, "rope_parameters": rope}, said)


SMOL = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_hidden_layers": 5}


def test_layers_without_a_rope_are_listed_or_every_so_many():
    assert read_config(SMOL).unrotated == (3,) and read_config(SMOL).rope.theta == 2e6
    assert read_config({**SMOL, "no_rope_layer_interval": 2}).unrotated == (1, 3)
    config = read_config({**SMOL, "no_rope_layers": [0, 1, 1, 0, 1, 1]})
    assert config.unrotated == (0, 3) and to_hf(config)["no_rope_layers"] == [0, 1, 1, 0, 1]
    assert [config.table(layer) for layer in range(3)] == ["rope_none", "rope", "rope"]
    refused({**SMOL, "no_rope_layers": [1, 0]}, "no_rope_layers ([1, 0]): must be a list of 0 or 1 for each of")
    refused({**SMOL, "no_rope_layer_interval": 0}, "no_rope_layer_interval (0)")
    refused({**SMOL, "use_sliding_window": True}, "use_sliding_window (True)")


OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "max_position_embeddings": 65536,
    "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_theta": 500000, "sliding_window": 4096,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": False, "vocab_size": 100278,
}  # fmt: skip


def test_olmo3_as_it_is_published():
    """Only layers that attend in full have the scaled rope; all have its base."""
    config = read_config(OLMO3)
    assert num_parameters(parameter_rows(config)) == 7_298_011_136 and config.windows == (*[4096] * 3, None) * 8
    assert (config.rope.kind, config.rope.theta, config.local_rope) == ("yarn", 5e5, RopeConfig(5e5))
    assert [config.table(layer) for layer in range(4)] == [*["rope_local"] * 3, "rope"]
    written = json.loads(json.dumps(to_hf(config)))
    assert read_config(written) == config and "rope_local_base_freq" not in written
    for spelled in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        assert read_config({key: written[key] for key in written if key not in spelled}) == config
    said = {key: OLMO3[key] for key in OLMO3 if key not in ("layer_types", "sliding_window", "rope_theta")}
    assert read_config(said) == config == read_config({**said, "sliding_window_pattern": 4})
    both = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    apart = read_config({**said, "rope_scaling": None, "rope_parameters": both})
    assert (apart.rope, apart.local_rope) == (RopeConfig(1e6), RopeConfig(1e4))
    refused({**said, "sliding_window_pattern": 2}, "sliding_window_pattern (2): must be 4")
    refused({**OLMO3, "rope_local_base_freq": 1e4}, "does not know this key of Olmo3ForCausalLM")
    refused({**OLMO3, "rope_scaling": {"rope_type": "yarn", "factor": 0}}, "rope_scaling.factor (0)")


COHERE2 = {
    "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5,
    "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "layer_norm_eps": 1e-05,
    "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 132096, "model_type": "cohere2",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0, "position_embedding_type": "rope_gptj",
    "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16", "use_cache": True, "use_embedding_sharing": True, "use_gated_activation": True,
    "use_parallel_block": True, "use_parallel_embedding": True, "vocab_size": 256000,
}  # fmt: skip


def test_cohere2_as_it_is_published():
    """One norm in a layer, and no rope in every fourth."""
    config = read_config(COHERE2)
    assert (config.tie_embeddings, config.scales, config.rms_norm_eps) == (True, Scales(logit_scale=0.25), 1e-5)
    assert config.windows == (*[4096] * 3, None) * 8 and config.rope == RopeConfig(5e4, interleaved=True)
    assert [config.table(layer) for layer in range(4)] == [*["rope"] * 3, "rope_none"]
    rows = parameter_rows(config)
    assert num_parameters(rows) == 8_028_033_024
    assert [row.name for row in rows if row.init == "ones" and row.layer in (0, None)] == [
        *("layers.0.attention.norm", "head.norm")
    ]
    written = json.loads(json.dumps(to_hf(config)))
    assert read_config(written) == config
    assert {key: written[key] for key in COHERE2 if key != "rope_scaling"} == {
        key: value for key, value in COHERE2.items() if value is not None
    }
    short = {
        key: COHERE2[key]
        for key in ("architectures", "vocab_size", "intermediate_size", "num_key_value_heads", "torch_dtype")
    }
    short |= {"hidden_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 32}
    found = read_config(short)
    assert (found.windows, found.unrotated, found.scales.logit_scale) == ((4096,) * 3, (), 0.0625)
    assert (found.rope.theta, found.max_position, found.head_dim, found.pad_token_id) == (1e4, 8192, 128, 0)
    assert read_config({**short, "sliding_window_pattern": 2}).unrotated == (1,)
    whole = read_config({**short, "layer_types": ["full_attention"] * 3})
    assert (whole.windows, whole.unrotated) == ((), (0, 1, 2)) and read_config(to_hf(whole)) == whole


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("use_parallel_block", False, "must be True"),
        ("use_gated_activation", False, "must be True"),
        ("use_embedding_sharing", False, "must be True"),
        ("use_qk_norm", True, "must be False"),
        ("position_embedding_type", "rope_neox", "must be 'rope_gptj'"),
        ("order_of_interleaved_layers", "global_attn_first", "must be 'local_attn_first'"),
        ("rotary_pct", 0.5, "must be greater than or equal to 1"),
        ("layer_switch", 2, "must be 4"),
        ("attention_bias", True, "not supported"),
        ("logit_scale", 0, "must be greater than 0"),
        ("sliding_window", None, "no sliding window is in use"),
        ("unrotated", [1], "is not a key of config.json"),
        ("rms_norm_eps", 1e-5, "does not know this key of Cohere2ForCausalLM"),
        ("rope_parameters", {"full_attention": {}, "sliding_attention": {}}, "differs between layers"),
    ],
)
def test_what_would_be_another_cohere2_is_refused(key, value, said):
    refused({**COHERE2, key: value}, said)


STARCODER2 = {
    "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1, "bos_token_id": 0, "embedding_dropout": 0.1,
    "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "initializer_range": 0.018042,
    "intermediate_size": 12288, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384, "mlp_type": "default",
    "model_type": "starcoder2", "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 24,
    "num_hidden_layers": 30, "num_key_value_heads": 2, "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
    "sliding_window": 4096, "torch_dtype": "bfloat16", "use_bias": True, "use_cache": True, "vocab_size": 49152,
}  # fmt: skip


def test_starcoder2_as_it_is_published():
    """Its dropout is for training it elsewhere: llmq trains without, and an export has the keys as they were."""
    config = read_config(STARCODER2)
    assert (config.qkv_bias, config.tie_embeddings, config.windows) == (True, True, (4096,) * 30)
    assert num_parameters(parameter_rows(config)) == 3_030_371_328
    written = to_hf(config)
    assert read_config(written) == config and {key: written[key] for key in STARCODER2} == STARCODER2
    said = {key: STARCODER2[key] for key in STARCODER2 if key not in ("norm_epsilon", "num_key_value_heads")}
    assert read_config(said) == config and not read_config({**said, "sliding_window": None}).windows
    rows = parameter_rows(read_config({**STARCODER2, "use_bias": False, "num_hidden_layers": 1}))
    assert [row.name for row in rows if row.name.endswith("bias")] == [
        *("layers.0.attention.norm_bias", "layers.0.mlp.norm_bias", "head.norm_bias")
    ]
    refused({**STARCODER2, "norm_type": "rms_norm"}, "norm_type ('rms_norm'): must be 'layer_norm'")
    refused({**STARCODER2, "mlp_type": "gated"}, "mlp_type ('gated')")
    refused({**STARCODER2, "hidden_act": "silu"}, "hidden_act ('silu')")
    refused({**STARCODER2, "use_bias": 1}, "use_bias (1)")


GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip


def test_gpt2_as_it_is_published():
    config = read_config(GPT2)
    assert config == replace(PRESETS["gpt2"], dtype="fp32")
    assert num_parameters(parameter_rows(config)) == 124_439_808
    assert {config.table(layer) for layer in range(12)} == {"rope_none"}
    written = to_hf(config)
    assert read_config(written) == config and {key: written[key] for key in GPT2} == GPT2
    assert to_hf(PRESETS["gpt2"])["activation_function"] == "gelu_new" and not {"rope_theta", "rope_scaling"} & {
        *written
    }
    short = {key: GPT2[key] for key in ("architectures", "vocab_size", "n_embd", "n_layer", "n_head")}
    assert read_config(short) == config == read_config({**GPT2, "n_inner": None, "num_key_value_heads": 3})
    assert read_config({**GPT2, "n_inner": 999}).intermediate_size == 999
    assert read_config({**GPT2, "reorder_and_upcast_attn": True}) == config


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("scale_attn_weights", False, "must be True"),
        ("scale_attn_by_inverse_layer_idx", True, "must be False"),
        ("add_cross_attention", True, "must be False"),
        ("activation_function", "relu", "only gelu_tanh is supported"),
        ("n_inner", 0, "must be greater than"),
        ("n_positions", "1024", "must be a valid integer"),
        ("quantum", 1, "does not know this key of GPT2LMHeadModel"),
    ],
)
def test_what_would_be_another_gpt2_is_refused(key, value, said):
    refused({**GPT2, key: value}, f"{key} ({value!r})", said)
    refused({**GPT2, "n_head": 7}, "hidden_size (768) is not a multiple of num_attention_heads (7)")


class WithLocalRope(Mistral):
    """Mistral, whose layers with a window have a rope of their own."""

    keys = LocalRopeKeys

    def counted(self, keys):
        return parted(super().counted(keys))


LOCAL = {
    **MISTRAL, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip


def test_two_ropes_are_read_and_written_as_transformers_4_and_5_spell_them(monkeypatch):
    monkeypatch.setitem(FAMILIES, "MistralForCausalLM", WithLocalRope("mistral", default_theta=1e6))
    linear = {"rope_type": "linear", "factor": 8.0}
    four = read_config({**LOCAL, "rope_scaling": linear, "rope_local_base_freq": 5e3})
    both = {"full_attention": {**linear, "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 5e3}}
    assert four == read_config({**LOCAL, "rope_parameters": both})
    assert (four.rope, four.local_rope) == (RopeConfig(1e6, "linear", 8.0), RopeConfig(5e3))
    assert [four.table(layer) for layer in range(3)] == ["rope_local", "rope", "rope_local"]
    assert read_config(LOCAL).local_rope == RopeConfig(1e4) and read_config(LOCAL).rope == RopeConfig(1e6)
    assert read_config(json.loads(json.dumps(to_hf(four)))) == four
    written = to_hf(four)
    for keys in (("rope_parameters",), ("rope_theta", "rope_scaling", "rope_local_base_freq")):
        assert read_config({key: value for key, value in written.items() if key not in keys}) == four
    refused({**LOCAL, "rope_local_base_freq": 4e3, "rope_parameters": both}, "contradicts rope_local_base_freq 4000")
    refused({**LOCAL, "rope_parameters": {"full_attention": {}, "chunked_attention": {}}}, "differs between layers")


def test_all_problems_are_said_at_once():
    refused(
        {"architectures": ["LlamaForCausalLM"], "mlp_bias": True, "hidden_act": "relu", "dtype": "float8"},
        *("mlp_bias", "hidden_act", "dtype", "vocab_size (absent)", "hidden_size (absent)", "num_hidden_layers"),
    )
    refused({}, "architectures (absent)")


def test_families_differ_where_transformers_does():
    llama, qwen2, qwen3, mistral = (read_config(c) for c in (LLAMA, QWEN2, QWEN3, MISTRAL))
    assert (qwen2.qkv_bias, qwen3.qkv_bias, llama.qkv_bias) == (True, False, False)
    assert (qwen2.qk_norm, qwen3.qk_norm, qwen3.head_dim) == (False, True, 16)
    assert mistral.windows == (4096,) * 3 and llama.windows == ()
    assert (mistral.eos_token_ids, qwen2.eos_token_ids) == ((2,), ())
    assert read_config({k: v for k, v in QWEN3.items() if k != "head_dim"}).head_dim == 128
    assert read_config({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}).num_kv_heads == 4
    assert read_config({**MISTRAL, "num_key_value_heads": None}).num_kv_heads == 4
    assert read_config({k: v for k, v in LLAMA.items() if k != "torch_dtype"}).dtype == "fp32"
    assert read_config({**QWEN2, "attention_bias": False}).qkv_bias
    assert read_config({**LLAMA, "pretraining_tp": 2, "pad_token_id": -1}).pad_token_id is None
    refused({k: v for k, v in MISTRAL.items() if k != "num_key_value_heads"}, "num_key_value_heads")


def test_sliding_windows():
    assert read_config({**MISTRAL, "sliding_window": None}).windows == ()
    assert read_config({**MISTRAL, "sliding_window": 7}).windows == (7, 7, 7)
    refused({**MISTRAL, "sliding_window": 0}, "sliding_window (0)")
    refused({**MISTRAL, "sliding_window": 7, "layer_types": ["full_attention"] * 3}, "layer_types")
    assert read_config({**QWEN2, "sliding_window": 7}).windows == ()
    sliding = {**QWEN2, "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}
    assert read_config(sliding).windows == (None, None, 7)
    listed = {**sliding, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert read_config(listed).windows == (7, None, 7)
    assert read_config({**sliding, "max_window_layers": 3}).windows == ()
    refused({**listed, "use_sliding_window": False}, "layer_types", "no sliding window")


CASES = {
    "llama3": {**LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True},
    "linear": {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}, "head_dim": 64},
    "codellama": {**LLAMA, "rope_theta": 1e6, "vocab_size": 32016, "torch_dtype": "float16", "eos_token_id": [2, 3]},
    "mistral": {**MISTRAL, "sliding_window": 16, "pad_token_id": 0},
    "mistral full": {**MISTRAL, "sliding_window": None, "eos_token_id": None},
    "qwen2": {**QWEN2, "sliding_window": 32, "use_sliding_window": False, "rope_theta": 1e6},
    "qwen2 sliding": {**QWEN2, "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {**QWEN3, "layer_types": ["full_attention"] * 3},
    "qwen3 mixed": {
        **QWEN3, "sliding_window": 9, "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_reads_back_the_same(name):
    config = read_config(CASES[name])
    written = to_hf(config)
    assert read_config(json.loads(json.dumps(written))) == config
    four = {k: v for k, v in written.items() if k not in ("rope_parameters", "dtype")}
    five = {k: v for k, v in written.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    assert read_config(four) == read_config(five) == config
    assert read_config(to_hf(replace(config, source={}))) == config
    assert read_config(to_hf(config, "fp32")) == replace(config, dtype="fp32")


def test_export_keeps_unrelated_keys_and_drops_what_is_not_true():
    source = {
        **LLAMA,
        "initializer_range": 0.01,
        "license": {"a": [1]},
        "auto_map": {"AutoModel": "m.py"},
        "use_cache": 0,
    }
    before = copy.deepcopy(source)
    written = to_hf(read_config(source))
    assert (written["initializer_range"], written["license"], written["use_cache"]) == (0.01, {"a": [1]}, 0)
    assert "auto_map" not in written and source == before


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": }', "\xff", "[" * 100_000, "1" * 5000, "null"])
def test_files_that_are_no_json_object(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"config\.json"):
        from_folder(tmp_path)
    with pytest.raises(DataError, match=r"config\.json is absent"):
        from_folder(tmp_path / "absent")


def test_mutated_configs_give_a_config_or_one_clear_error():
    draw = random.Random(1)
    pool = [None, True, False, 0, -1, 1, 3, 10**30, 1e-9, float("nan"), float("inf"), "", "silu", "llama3", [], [1], {}]
    pool += [{"rope_type": "llama3"}, {"type": "linear", "factor": -1}, {"a": {}}, ["full_attention"] * 3, [None], "é"]
    outcomes = {True: 0, False: 0}
    for _ in range(600):
        mapping = dict(draw.choice(list(CASES.values())))
        keys = [*mapping, "rope_scaling", "rope_parameters", "dtype", "layer_types", "sliding_window", "eos_token_id"]
        for key in draw.sample(keys, draw.randint(1, 2)):
            if draw.random() < 0.3:
                mapping.pop(key, None)
            else:
                mapping[key] = draw.choice(pool)
        try:
            assert read_config(to_hf(read_config(mapping))) == read_config(mapping)
        except LlmqError as error:
            assert "cannot be used" in str(error)
            outcomes[False] += 1
        else:
            outcomes[True] += 1
    assert min(outcomes.values()) > 50  # the mutations are neither all harmless nor all fatal


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_export(name):
    assert read_config(to_hf(PRESETS[name])) == PRESETS[name]


@pytest.mark.parametrize(
    ("name", "millions"),  # published parameter counts
    [
        ("tiny_llama3_50m", 50.5), ("tiny_llama3_150m", 148.8), ("tinyllama", 1100.0), ("llama1_7b", 6738.4),
        ("llama2_7b", 6738.4), ("llama2_13b", 13015.9), ("llama2_70b", 68976.6), ("code_llama_7b", 6738.5),
        ("llama3_8b", 8030.3), ("llama3_70b", 70553.7), ("llama3_405b", 405853.4), ("Qwen2.5-0.5B", 494.0),
        ("Qwen2.5-1.5B", 1543.7), ("Qwen2.5-3B", 3085.9), ("Qwen2.5-7B", 7615.6), ("Qwen2.5-14B", 14770.0),
        ("Qwen2.5-32B", 32763.9), ("Qwen2.5-72B", 72706.2), ("Qwen3-0.6B", 596.0), ("Qwen3-1.7B", 1720.6),
        ("Qwen3-4B", 4022.5), ("Qwen3-8B", 8190.7), ("Mistral-7B", 7241.7), ("gpt2", 124.4),
    ],
)  # fmt: skip
def test_preset_sizes(name, millions):
    total = 0
    for row in parameter_rows(preset(name)):
        width = row.shape[1] if len(row.shape) > 1 else 1
        total += sum((part.stop - part.start) * width for part in row.parts)
    assert total / 1e6 == pytest.approx(millions, abs=0.06)


def test_preset_names_in_any_case_and_near_ones():
    assert preset("QWEN2.5-0.5b") is PRESETS["Qwen2.5-0.5B"]
    with pytest.raises(UsageError, match="nearest: Qwen3-4B"):
        preset("qwen3_4b")
    with pytest.raises(UsageError, match="known are"):
        preset("zzz")
    for name in ("llama3_8b_instruct", "LLAMA3_8B-Instruct"):
        assert preset(name) is PRESETS["llama3_8b"]


def test_another_vocabulary_has_only_special_tokens_of_its_own():
    config = PRESETS["llama3_8b"].with_vocabulary(128001)
    assert (config.vocab_size, config.bos_token_id, config.eos_token_ids) == (128001, 128000, ())


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the shared data folder is absent")
def test_published_configs():
    for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen2.5-7B", "Qwen3-0.6B"):
        assert from_folder(CONFIGS / name) == PRESETS[name]
    assert from_folder(CONFIGS / "Mistral-7B-v0.1") == PRESETS["Mistral-7B"]
    assert from_folder(CONFIGS / "Llama-3.1-8B").rope == PRESETS["llama3_405b"].rope
    with pytest.raises(DataError, match="qwen3_moe"):
        from_folder(CONFIGS / "Qwen3-30B-A3B")


@pytest.mark.judge
@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_the_same_and_writes_what_reads_here(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = read_config(CASES[name])
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config)))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (
        theirs.architectures == [config.architecture] and theirs.model_type == FAMILIES[config.architecture].model_type
    )
    sizes = (theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size, theirs.num_hidden_layers)
    assert sizes == (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers)
    heads = (theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim, theirs.tie_word_embeddings)
    assert heads == (config.num_heads, config.num_kv_heads, config.head_dim, config.tie_embeddings)
    rope = getattr(theirs, "rope_parameters", None) or {"rope_theta": theirs.rope_theta, **(theirs.rope_scaling or {})}
    assert rope["rope_theta"] == config.rope.theta and rope.get("rope_type", "default") == config.rope.kind
    assert rope.get("factor", 1.0) == config.rope.factor
    theirs.save_pretrained(tmp_path / "again")
    assert from_folder(tmp_path / "again") == config


@pytest.mark.parametrize(
    ("key", "value"),
    [("vocab_size", 2**24 + 1), ("hidden_size", 2**30), ("intermediate_size", 2**30), ("num_hidden_layers", 257)],
)
def test_sizes_that_no_model_has_are_refused(key, value):
    """They would be planned for hours: a vocabulary of 2^31 took more than a minute."""
    with pytest.raises(DataError, match=rf"{key} \({value}\): must be less than or equal to"):
        read_config({**CASES["linear"], key: value})


def test_heads_are_refused_that_are_too_wide_together():
    with pytest.raises(DataError, match=r"head_dim \(262144\): times num_attention_heads"):
        read_config(
            {**next(iter(CASES.values())), "head_dim": 2**18, "num_attention_heads": 8, "num_key_value_heads": 8}
        )
