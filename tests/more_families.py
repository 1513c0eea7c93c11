"""Tiny models of the families beyond Llama's, as config.json: what transformers makes of them is the judge."""

from typing import Any

MORE_LENGTH = 24  # tokens of a row that golden files are made of
_SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,  # of which transformers drops the gradient
    "dtype": "bfloat16",
}


def _of(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    return {**_SHAPE, "architectures": [f"{architecture}ForCausalLM"], "model_type": model_type, **keys}


MORE: dict[str, dict[str, Any]] = {
    "gemma2": _of(
        "Gemma2",
        "gemma2",
        head_dim=12,
        tie_word_embeddings=True,
        query_pre_attn_scalar=7,
        sliding_window=6,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=2.0,
        rope_theta=1000.0,
    ),
    "gemma3": _of(
        "Gemma3",
        "gemma3_text",
        head_dim=8,
        tie_word_embeddings=True,
        query_pre_attn_scalar=16,
        sliding_window=5,
        sliding_window_pattern=2,
        rope_theta=1e5,
        rope_local_base_freq=100.0,
    ),
    "olmo2": _of("Olmo2", "olmo2", rope_theta=500000.0),
    "olmo3": _of(
        "Olmo3",
        "olmo3",
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
                "attention_factor": 1.2,
            },
        },
    ),
    "cohere2": _of(
        "Cohere2",
        "cohere2",
        logit_scale=0.3,
        layer_norm_eps=1e-4,
        sliding_window=5,
        rope_theta=1000.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=True,
    ),
    "glm4": _of("Glm4", "glm4", attention_bias=True, head_dim=12, partial_rotary_factor=0.5, num_hidden_layers=2),
    "phi3": _of("Phi3", "phi3", sliding_window=9, rms_norm_eps=1e-4),
    "granite": _of(
        "Granite",
        "granite",
        embedding_multiplier=6.0,
        attention_multiplier=0.4,
        residual_multiplier=0.3,
        logits_scaling=4.0,
        tie_word_embeddings=True,
    ),
    "phi4_mini": _of("Phi3", "phi3", partial_rotary_factor=0.75, num_attention_heads=4, tie_word_embeddings=True),
    "glm": _of("Glm", "glm", attention_bias=True, head_dim=12, partial_rotary_factor=0.5, num_hidden_layers=2),
    "smollm3": _of("SmolLM3", "smollm3", no_rope_layers=[1, 0, 1], num_attention_heads=2, num_key_value_heads=1),
    "starcoder2": _of(
        "Starcoder2", "starcoder2", sliding_window=7, norm_epsilon=1e-4, residual_dropout=0.1, tie_word_embeddings=True
    ),
    "starcoder2_plain": _of("Starcoder2", "starcoder2", use_bias=False, num_hidden_layers=1),
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 97,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_inner": 80,
        "n_positions": 64,
        "layer_norm_epsilon": 1e-4,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    },
    "ministral": _of(
        "Ministral",
        "ministral",
        head_dim=16,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}

ROPES: dict[str, dict[str, Any]] = {
    "yarn": _of("Llama", "llama", rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
    "dynamic": _of(
        "Llama", "llama", max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "factor": 4.0}
    ),
    "longrope": _of(
        "Phi3",
        "phi3",
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [2.0, 4.0, 8.0, 16.5],
        },
    ),
}  # rows of 24 tokens are longer than what the last two change at; generation of transformers changes on its way

GPT2_NAMES = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "layers": "transformer.h",
    "attention_norm": "ln_1",
    "qkv": ["attn.c_attn"],
    "o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up": ["mlp.c_fc"],
    "down": "mlp.c_proj",
    "norm": "transformer.ln_f",
}
SANDWICH = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
DESCRIPTIONS: dict[str, dict[str, Any]] = {  # of families that llmq knows, over Llama's facts but where `like` is given
    "olmo2": {
        "where": "post",
        "qk_norm": "all",
        "defaults": {"rms_norm_eps": 1e-5},
        "names": {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    },
    "glm4": {
        "where": "pre+post",
        "biases": "qkv",
        "harmless": ["attention_bias"],
        "rope": {"partial": 0.5, "interleaved": True},
        "defaults": {"rms_norm_eps": 1.5625e-07},
        "names": {
            "attention_post_norm": "post_self_attn_layernorm",
            "up": ["mlp.gate_up_proj"],
            "mlp_post_norm": "post_mlp_layernorm",
        },
    },
    "gemma2": {
        "like": "gemma2",
        "norm": "rmsnorm",
        "where": "pre+post",
        "norm_offset": 1,
        "activation": "gelu_tanh",
        "scaled_embedding": True,
        "names": SANDWICH,
    },
    "gpt2": {
        "like": "gpt2",
        "norm": "layernorm",
        "gated": False,
        "activation": "gelu_tanh",
        "biases": "all",
        "transposed": True,
        "names": GPT2_NAMES,
    },
}


def unknown(name: str, **keys: Any) -> dict[str, Any]:
    """A config of an architecture that llmq does not know."""
    return {**MORE[name], "architectures": ["OwnForCausalLM"], "model_type": "own", **keys}
