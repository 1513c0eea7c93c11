"""Tiny models of every family: config.json, weights and batches, the same bits wherever they are computed.

make_golden.py (torch, transformers) and the tests (NumPy alone) both call these functions, so the golden files hold
only what transformers made of them. Weights are small integers times powers of two: exact in bf16, hence the same
model in every precision, and drawn as integers from NumPy's frozen legacy generator (NEP 19), hence the same model
on every machine. No norm weight is 1 and no bias is 0, or a forgotten one would not be seen.
"""

import hashlib
import json
from typing import Any

import numpy as np

VOCAB = 97  # padded inside to 128
BATCH, LENGTH = 2, 32
STEPS = 20  # of AdamW, each on a batch of its own
BATCHES_BF16 = 4  # tensors of 8 elements have noisy errors: the root mean square over this many batches is compared
ADAMW = {"beta_1": 0.9, "beta_2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
SKETCH_COLUMNS = 4
FULL_BELOW = 256  # tensors with fewer elements are stored whole

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}
_LLAMA = {**_SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False}
_QWEN2 = {**_SHAPE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
_QWEN3 = {**_QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
# theta 100 and 8 dimensions per head give wavelengths 6, 20, 63 and 199: with 32 original positions these are kept,
# blended, scaled and scaled, so all branches of the llama3 rule are taken
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {**_LLAMA, "num_key_value_heads": 4, "rope_theta": 10000.0, "torch_dtype": "float16"},
    "llama3": {**_LLAMA, "rope_theta": 500000.0, "torch_dtype": "bfloat16"},
    "llama3.2": {
        **_LLAMA,
        "tie_word_embeddings": True,
        "head_dim": 8,
        "rope_theta": 100.0,
        "rope_scaling": _LLAMA3_SCALING,
        "torch_dtype": "bfloat16",
    },
    "llama_linear": {
        **_LLAMA,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        "dtype": "float32",
    },
    "code_llama": {**_LLAMA, "num_key_value_heads": 4, "rope_theta": 1000000, "torch_dtype": "bfloat16"},
    "mistral": {
        **{k: v for k, v in _LLAMA.items() if k != "attention_bias"},
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 7,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    },
    "qwen2": {
        **_QWEN2,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": 4,
        "max_window_layers": 0,
        "torch_dtype": "bfloat16",
    },
    "qwen2.5_tied": {**_QWEN2, "tie_word_embeddings": True, "rope_theta": 1000000.0, "torch_dtype": "bfloat16"},
    "qwen2_window": {
        **_QWEN2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "dtype": "bfloat16",
    },
    "qwen3": {**_QWEN3, "head_dim": 16, "rope_theta": 1000000, "torch_dtype": "bfloat16"},
    "qwen3_tied": {
        **_QWEN3,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "dtype": "bfloat16",
    },
}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a model's tensors, written apart from llmq.model.parameters: a judge."""
    c, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or c // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, c)}
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}."
        for name, width in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (width, c)
            if config["model_type"] == "qwen2":
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (width,)
        if config["model_type"] == "qwen3":
            shapes[f"{layer}self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{layer}self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (c, q)
        shapes[f"{layer}mlp.gate_proj.weight"] = (f, c)
        shapes[f"{layer}mlp.up_proj.weight"] = (f, c)
        shapes[f"{layer}mlp.down_proj.weight"] = (c, f)
        shapes[f"{layer}input_layernorm.weight"] = (c,)
        shapes[f"{layer}post_attention_layernorm.weight"] = (c,)
    shapes["model.norm.weight"] = (c,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, c)
    return shapes


def _stream(*address: object) -> np.random.RandomState:
    """A generator addressed by what it is for."""
    digest = hashlib.sha256("/".join(map(str, address)).encode()).digest()
    return np.random.RandomState(np.frombuffer(digest, "<u4"))


def weights(
    config: dict[str, Any], seed: int = 0, shapes: dict[str, tuple[int, ...]] | None = None
) -> dict[str, np.ndarray]:
    """Hugging Face name -> f32 array, exact in bf16, of tensors with these shapes, or of those of a config. Uniform:
    matrices of standard deviation about 0.8 / sqrt(inputs), norm weights in [0.69, 1.31], biases in [-0.5, 0.5],
    embeddings of standard deviation 0.57, or 0.29 if tied."""
    drawn = {}
    for name, shape in (shapes or tensor_shapes(config)).items():
        is_norm = "norm" in name or (len(shape) == 1 and name.endswith("weight"))
        limit = 40 if is_norm else 127
        k = _stream("weight", seed, name).randint(-limit, limit + 1, size=shape, dtype=np.int64).astype(np.float32)
        if is_norm:
            drawn[name] = 1 + k / 128
        elif name.endswith("bias"):
            drawn[name] = k / 256
        elif name.endswith(("embed_tokens.weight", "wte.weight", "wpe.weight")):
            drawn[name] = k / (256 if config["tie_word_embeddings"] else 128)
        else:
            drawn[name] = k * np.float32(2.0 ** round(np.log2(0.8 / 73 / np.sqrt(shape[1]))))
    return drawn


def batch(vocab_size: int, index: int, batch_size: int = BATCH, length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets (B,T) int32: the next token, or -100 (not trained) for none to seven in eight of them."""
    draw = _stream("batch", index, batch_size, length)
    stream = draw.randint(0, vocab_size, size=(batch_size, length + 1), dtype=np.int64).astype(np.int32)
    masked = draw.randint(0, 8, size=(batch_size, length), dtype=np.int64) < 3 * index % 8
    return stream[:, :-1], np.where(masked, np.int32(-100), stream[:, 1:])


def learning_rate(step: int) -> float:
    """Of the AdamW run, for step 1, 2, ...: never the same twice running, so that a rate taken one step off is seen."""
    return 1e-3 * (1 + step % 7 / 4)


def grad_clip(config: dict[str, Any]) -> float:
    """Of the AdamW run: between the gradient norms of its steps, as AdamW hardly sees a factor common to all."""
    return 5.5 if config["tie_word_embeddings"] else 2.2


def sketch(name: str, tensor: np.ndarray) -> np.ndarray:
    """A small tensor whole, a large one as products of each row with four fixed vectors of random signs.

    The squared norm of a difference of sketches is, on average, that of the difference of the tensors (Johnson and
    Lindenstrauss), and within a few percent of it for the hundreds of products here; an error keeps its row.
    """
    if tensor.size < FULL_BELOW:
        return np.asarray(tensor)
    columns = tensor.shape[-1]
    signs = _stream("signs", name).randint(0, 2, size=(columns, SKETCH_COLUMNS), dtype=np.int64) * 2.0 - 1.0
    return tensor.reshape(-1, columns) @ (signs / np.sqrt(SKETCH_COLUMNS))


def fingerprint(config: dict[str, Any]) -> str:
    """Of everything that goes into a golden file: a file made from other inputs is no wrong result."""
    digest = hashlib.sha256(
        json.dumps([config, ADAMW, grad_clip(config), STEPS, BATCHES_BF16], sort_keys=True).encode()
    )
    for name, array in weights(config).items():
        digest.update(name.encode() + array.tobytes() + sketch(name, array.astype(np.float64)).tobytes())
    for step in range(1, STEPS + 1):
        digest.update(b"".join(a.tobytes() for a in batch(config["vocab_size"], step)) + b"%r" % learning_rate(step))
    return digest.hexdigest()
