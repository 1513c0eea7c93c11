"""Shapes of well-known models, for training from scratch without a config.json. Presets have no weights.

Sizes, rotary base and context length are the published ones (Llama 3 405B is the 3.1 release, the only one there is);
the storage type is bf16 throughout. The two `tiny_llama3` models are our own: Llama 3's vocabulary and proportions.
"""

import difflib
import re
from functools import partial

from llmq.errors import UsageError
from llmq.model.config import ModelConfig, RopeConfig
from llmq.model.wiring import Scales

_llama = partial(ModelConfig, "LlamaForCausalLM", bos_token_id=1, eos_token_ids=(2,))
_llama3 = partial(
    ModelConfig,
    "LlamaForCausalLM",
    128256,
    rms_norm_eps=1e-5,
    max_position=8192,
    rope=RopeConfig(500000.0),
    bos_token_id=128000,
    eos_token_ids=(128001,),
)
_qwen25 = partial(
    ModelConfig, "Qwen2ForCausalLM", rope=RopeConfig(1e6), qkv_bias=True, bos_token_id=151643, eos_token_ids=(151643,)
)
_qwen3 = partial(
    ModelConfig,
    "Qwen3ForCausalLM",
    151936,
    head_dim=128,
    rms_norm_eps=1e-6,
    max_position=40960,
    rope=RopeConfig(1e6),
    qk_norm=True,
    bos_token_id=151643,
    eos_token_ids=(151645,),
)
_qwen25_small = partial(_qwen25, rms_norm_eps=1e-6, max_position=32768)
_qwen25_large = partial(_qwen25, rms_norm_eps=1e-5, max_position=131072)
_rope31 = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)

_gemma3 = partial(
    ModelConfig,
    "Gemma3ForCausalLM",
    local_rope=RopeConfig(),
    tie_embeddings=True,
    qk_norm=True,
    bos_token_id=2,
    eos_token_ids=(1, 106),
    pad_token_id=0,
    scales=Scales(query_pre_attn_scalar=256),
)


def _every(layers: int, nth: int, window: int) -> tuple[int | None, ...]:
    """Windows of layers of which each nth attends in full."""
    return tuple(window if layer % nth else None for layer in range(1, layers + 1))


# vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim
PRESETS: dict[str, ModelConfig] = {
    "tiny_llama3_50m": _llama3(256, 1024, 18, 4, 2, 64, tie_embeddings=True),
    "tiny_llama3_150m": _llama3(768, 2048, 8, 12, 4, 64, tie_embeddings=True),
    "tinyllama": _llama(32000, 2048, 5632, 22, 32, 4, 64, 1e-5, 2048),
    "llama1_7b": _llama(32000, 4096, 11008, 32, 32, 32, 128, 1e-6, 2048),
    "llama2_7b": _llama(32000, 4096, 11008, 32, 32, 32, 128, 1e-5, 4096),
    "llama2_13b": _llama(32000, 5120, 13824, 40, 40, 40, 128, 1e-5, 4096),
    "llama2_70b": _llama(32000, 8192, 28672, 80, 64, 8, 128, 1e-5, 4096),
    "code_llama_7b": _llama(32016, 4096, 11008, 32, 32, 32, 128, 1e-5, 16384, RopeConfig(1e6)),
    "llama3_8b": _llama3(4096, 14336, 32, 32, 8, 128),
    "llama3_70b": _llama3(8192, 28672, 80, 64, 8, 128),
    "llama3_405b": _llama3(16384, 53248, 126, 128, 8, 128, max_position=131072, rope=_rope31),
    "Qwen2.5-0.5B": _qwen25_small(151936, 896, 4864, 24, 14, 2, 64, tie_embeddings=True),
    "Qwen2.5-1.5B": _qwen25_small(151936, 1536, 8960, 28, 12, 2, 128, tie_embeddings=True),
    "Qwen2.5-3B": _qwen25_small(151936, 2048, 11008, 36, 16, 2, 128, tie_embeddings=True),
    "Qwen2.5-7B": _qwen25_small(152064, 3584, 18944, 28, 28, 4, 128),
    "Qwen2.5-14B": _qwen25_large(152064, 5120, 13824, 48, 40, 8, 128),
    "Qwen2.5-32B": _qwen25_large(152064, 5120, 27648, 64, 40, 8, 128),
    "Qwen2.5-72B": _qwen25_large(152064, 8192, 29568, 80, 64, 8, 128),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, tie_embeddings=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, tie_embeddings=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, tie_embeddings=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8),
    "Mistral-7B": ModelConfig(
        "MistralForCausalLM", 32000, 4096, 14336, 32, 32, 8, 128, 1e-5, 32768,
        windows=(4096,) * 32, bos_token_id=1, eos_token_ids=(2,),
    ),
    "phi4": ModelConfig(
        "Phi3ForCausalLM", 100352, 5120, 17920, 40, 40, 10, 128, 1e-5, 16384, RopeConfig(250000.0),
        bos_token_id=100257, eos_token_ids=(100265,), pad_token_id=100349,
    ),
    "granite3_8b": ModelConfig(
        "GraniteForCausalLM", 49155, 4096, 12800, 40, 32, 8, 128, 1e-5, 4096, tie_embeddings=True,
        bos_token_id=0, eos_token_ids=(0,), pad_token_id=0, scales=Scales(0.0078125, 12.0, 0.22, 16.0),
    ),
    "gemma2_9b": ModelConfig(
        "Gemma2ForCausalLM", 256000, 3584, 14336, 42, 16, 8, 256, 1e-6, 8192, tie_embeddings=True,
        windows=_every(42, 2, 4096), bos_token_id=2, eos_token_ids=(1,), pad_token_id=0,
        scales=Scales(query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    ),
    "gemma3_1b": _gemma3(262144, 1152, 6912, 26, 4, 1, 256, 1e-6, 32768, RopeConfig(1e6), windows=_every(26, 6, 512)),
    "gemma3_4b": _gemma3(
        262208, 2560, 10240, 34, 8, 4, 256, 1e-6, 131072, RopeConfig(1e6, "linear", 8.0), windows=_every(34, 6, 1024)
    ),
    "olmo2_7b": ModelConfig(
        "Olmo2ForCausalLM", 100352, 4096, 11008, 32, 32, 32, 128, 1e-6, 4096, RopeConfig(500000.0),
        eos_token_ids=(100257,), pad_token_id=100277,
    ),
    "smollm3_3b": ModelConfig(
        "SmolLM3ForCausalLM", 128256, 2048, 11008, 36, 16, 4, 128, 1e-6, 65536, RopeConfig(5e6), tie_embeddings=True,
        unrotated=tuple(range(3, 36, 4)), bos_token_id=128000, eos_token_ids=(128001,), pad_token_id=128004,
    ),
    "gpt2": ModelConfig(
        "GPT2LMHeadModel", 50257, 768, 3072, 12, 12, 12, 64, 1e-5, 1024, tie_embeddings=True, qkv_bias=True,
        bos_token_id=50256, eos_token_ids=(50256,),
    ),
    "glm4_9b": ModelConfig(
        "Glm4ForCausalLM", 151552, 4096, 13696, 40, 32, 2, 128, 1e-5, 32768,
        RopeConfig(10000.0, partial=0.5, interleaved=True), qkv_bias=True,
        eos_token_ids=(151329, 151336, 151338), pad_token_id=151329,
    ),
}  # fmt: skip


# Ungated repositories of the Hub with the tokenizer of the presets whose names begin so.
_TOKENIZERS = {
    "llama3_8b_instruct": "NousResearch/Meta-Llama-3-8B-Instruct",
    "llama3_70b_instruct": "NousResearch/Meta-Llama-3-8B-Instruct",
    "tiny_llama3": "NousResearch/Meta-Llama-3-8B",
    "llama3": "NousResearch/Meta-Llama-3-8B",
    "tinyllama": "unsloth/llama-2-7b",  # Llama 1 and TinyLlama have that of Llama 2
    "llama1": "unsloth/llama-2-7b",
    "llama2": "unsloth/llama-2-7b",
    "code_llama": "codellama/CodeLlama-7b-hf",
    "Qwen2.5": "Qwen/Qwen2.5-0.5B",
    "Qwen3": "Qwen/Qwen3-0.6B",
    "Mistral": "unsloth/mistral-7b",
    "phi4": "microsoft/phi-4",
    "granite3": "ibm-granite/granite-3.0-8b-base",
    "gemma2": "unsloth/gemma-2-9b",
    "gemma3": "unsloth/gemma-3-1b-pt",
    "olmo2": "allenai/OLMo-2-1124-7B",
    "smollm3": "HuggingFaceTB/SmolLM3-3B-Base",
    "glm4": "zai-org/GLM-4-9B-0414",
    "gpt2": "openai-community/gpt2",
}
# Short names of models of the Hub, which have weights.
HUB_NAMES = {
    "llama3_8b_instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama3_70b_instruct": "meta-llama/Meta-Llama-3-70B-Instruct",
}


def is_known(name: str) -> bool:
    """Whether a name is that of a preset, or of a model of the Hub by an organization that these models are of."""
    organization, _, rest = name.partition("/")
    organizations = {hub.partition("/")[0] for hub in (*_TOKENIZERS.values(), *HUB_NAMES.values())}
    known = {preset.lower() for preset in (*PRESETS, *HUB_NAMES)}
    return name.lower() in known or (organization in organizations and rest.count("/") == 0 < len(rest))


def preset_tokenizer(name: str) -> str:
    """The hub name of a preset's tokenizer, which anyone can download."""
    return next(repository for start, repository in _TOKENIZERS.items() if name.lower().startswith(start.lower()))


def preset(name: str) -> ModelConfig:
    """The preset of this name, in any case, of an instruct model that of its base; UsageError with the nearest names if
    there is none."""
    names = {known.lower(): known for known in PRESETS}
    if (base := re.sub("[-_]instruct$", "", name.lower())) in names:
        return PRESETS[names[base]]
    near = [names[n] for n in difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)]
    known = f"nearest: {', '.join(near)}" if near else f"known are {', '.join(PRESETS)}"
    raise UsageError(f"there is no preset {name!r}; {known}")
