"""The families that llmq knows: names, the defaults of their keys, and what their layers are made of."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PlainValidator

from llmq.model.families import ConfigKeys, Family, Mistral, Qwen, UnrotatedKeys
from llmq.model.key_types import Positive
from llmq.model.wiring import Names, Wiring
from llmq.plugins import Table, table

if TYPE_CHECKING:
    from llmq.model.config import ModelConfig


class GraniteKeys(ConfigKeys):
    """Those of Granite 3, whose multipliers are facts."""

    attention_multiplier: Positive = 1.0
    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0


class Granite(Family):
    """Llama with multipliers."""

    keys = GraniteKeys


class GlmKeys(ConfigKeys):
    """Those of GLM 4, with biases unless a key says otherwise."""

    qkv_bias: bool = Field(True, alias="attention_bias")


class Glm(Family):
    """Llama with a partial rotary embedding of neighbours."""

    keys = GlmKeys


def without_window(value: Any) -> bool:
    """ValueError unless no layer has a window."""
    if value:
        raise ValueError("sliding windows are not supported for this architecture")
    return False


class Windowed(Family):
    """Layers are listed with their kinds, and those that slide have one window."""

    def counted(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """All but what Qwen has."""
        return {**keys, "use_sliding_window": None, "max_window_layers": 0}

    def window_keys(self, config: "ModelConfig") -> dict[str, Any]:
        """The window, and the kind of each layer."""
        kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
        return {"layer_types": kinds, "sliding_window": next(filter(None, config.windows))} if config.windows else {}


class SmolLm3Keys(UnrotatedKeys):
    """Those of config.json, where no layer has a window."""

    use_sliding_window: Annotated[bool, PlainValidator(without_window)] = False


class SmolLm3(Family):
    """Some layers have no rotary embedding."""

    keys = SmolLm3Keys

    def counted(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """All but what says which layers have a window, if any may have one."""
        return {**super().counted(keys), "use_sliding_window": keys.get("use_sliding_window")}


_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_WINDOWS = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}
FAMILIES: Table[Family] = table(
    "family",
    {
        "LlamaForCausalLM": Family("llama", _ENDS),
        "MistralForCausalLM": Mistral(
            "mistral", {**_WINDOWS, **_ENDS, "max_position_embeddings": 131072, "num_key_value_heads": 8}
        ),
        "Qwen2ForCausalLM": Qwen("qwen2", _WINDOWS, facts={"qkv_bias": True}, takes=frozenset({"attention_bias"})),
        "Qwen3ForCausalLM": Qwen("qwen3", {**_WINDOWS, "head_dim": 128}, facts={"qk_norm": True}),
        "Phi3ForCausalLM": Mistral(
            "phi3",
            {"bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000, "rms_norm_eps": 1e-5}
            | {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
            rope_kinds={"su": "longrope", "yarn": "longrope"},
            partial=True,
            wiring=Wiring(Names(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))),
        ),
        "GlmForCausalLM": Glm(
            "glm",
            {"head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07}
            | {"partial_rotary_factor": 0.5, "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329},
            partial=True,
            interleaved=True,
            wiring=Wiring(Names(up=("mlp.gate_up_proj",))),
        ),
        "GraniteForCausalLM": Granite("granite", _ENDS),
        "SmolLM3ForCausalLM": SmolLm3(
            "smollm3",
            {"bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 128004, "num_key_value_heads": 4}
            | {"max_position_embeddings": 32768, "tie_word_embeddings": True},
            default_theta=2e6,
        ),
        "MinistralForCausalLM": Windowed("ministral", {**_ENDS, "num_key_value_heads": 8, "sliding_window": 4096}),
    },
    needs=("model_type", "rows"),
)
