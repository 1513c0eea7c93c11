"""The families that llmq knows: names, the defaults of their keys, and what their layers are made of."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo

from llmq.model.families import (
    ConfigKeys,
    Family,
    LocalRopeKeys,
    Mistral,
    MistralKeys,
    Qwen,
    UnrotatedKeys,
    listed_windows,
)
from llmq.model.key_types import MAX_LAYERS, Positive, Size, Width
from llmq.model.multimodal import INSIDE, Within
from llmq.model.rope_keys import Rope, own_local_rope, parted
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


def every_nth_whole(listed: Any, info: ValidationInfo) -> tuple[int | None, ...]:
    """Windows of layers, of which each `window_pattern`th attends in full, unless they are listed."""
    every, layers = info.data.get("window_pattern", 1), info.data.get("num_layers", 0)
    kinds = ["sliding_attention" if n % every else "full_attention" for n in range(1, layers + 1)]
    return listed_windows(kinds if listed is None else listed, info)


class GlmKeys(ConfigKeys):
    """Those of GLM 4, with biases unless a key says otherwise."""

    qkv_bias: bool = Field(True, alias="attention_bias")


class Gemma2Keys(ConfigKeys):
    """Those of Gemma 2, where every second layer attends in full, with soft-caps."""

    window_pattern: Size = Field(2, alias="sliding_window_pattern")
    windows: Annotated[Any, PlainValidator(every_nth_whole)] = Field(None, alias="layer_types")
    query_pre_attn_scalar: Size | Positive = 256  # whole, unless it is given otherwise
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None


class Gemma3Keys(LocalRopeKeys):
    """Those of Gemma 3, where every sixth layer attends in full."""

    window_pattern: Size = Field(6, alias="sliding_window_pattern")
    windows: Annotated[Any, PlainValidator(every_nth_whole)] = Field(None, alias="layer_types")
    query_pre_attn_scalar: Size | Positive = 256


class Olmo3Keys(ConfigKeys):
    """Those of OLMo 3, where every fourth layer attends in full, and only such layers have a scaled rope."""

    local_rope: Annotated[Rope | None, AfterValidator(own_local_rope)] = Field(None, alias="local_rope_parameters")
    window_pattern: Literal[4] = Field(4, alias="sliding_window_pattern")
    windows: Annotated[Any, PlainValidator(every_nth_whole)] = Field(None, alias="layer_types")


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


def unrotated_in_full(given: Any, info: ValidationInfo) -> tuple[int, ...]:
    """The layers without a window. ValueError if a file has a key for them."""
    if given is not None:
        raise ValueError("is not a key of config.json: layers that attend in full have no rotary embedding")
    windows = info.data.get("windows") or (None,) * info.data.get("num_layers", 0)
    return tuple(layer for layer, window in enumerate(windows) if window is None)


class Cohere2Keys(ConfigKeys):
    """Those of Cohere 2, some of which say what is so in every model of it."""

    rms_norm_eps: Positive = Field(1e-5, alias="layer_norm_eps")
    logit_scale: Positive = 0.0625
    window_pattern: Size = Field(4, alias="sliding_window_pattern")
    windows: Annotated[Any, PlainValidator(every_nth_whole)] = Field(None, alias="layer_types")
    unrotated: Annotated[Any, PlainValidator(unrotated_in_full)] = None
    order_of_interleaved_layers: Literal["local_attn_first"] = "local_attn_first"
    position_embedding_type: Literal["rope_gptj"] = "rope_gptj"
    rotary_pct: Annotated[float, Field(ge=1, le=1)] = 1.0
    layer_switch: Literal[4] = 4
    use_gated_activation: Literal[True] = True
    use_parallel_block: Literal[True] = True
    use_embedding_sharing: Literal[True] = True
    use_parallel_embedding: bool = True  # which says how, not what
    use_qk_norm: Literal[False] = False


class Cohere2(Windowed):
    """Attention and MLP side by side after one LayerNorm; layers with a window have a rope of neighbours, others none;
    logits are multiplied."""

    keys = Cohere2Keys

    def counted(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """All but the size of heads, which follows from others."""
        return {**super().counted(keys), "head_dim": None}


class Gemma2(Windowed):
    """Norms on both sides that multiply by 1 + w, a scaled embedding, GeGLU, soft-caps."""

    keys, act_key = Gemma2Keys, "hidden_activation"


class Gemma3(Windowed):
    """Gemma 2 with norms of q and k and a rope of layers with a window in place of soft-caps."""

    keys, act_key = Gemma3Keys, "hidden_activation"

    def counted(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """With the ropes of both kinds of layers."""
        return super().counted(parted(keys))


class Olmo3(Windowed):
    """OLMo 2 with windows, and a rope of layers that have one."""

    keys = Olmo3Keys

    def counted(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """With the ropes of both kinds of layers."""
        return super().counted(parted(keys))


class SmolLm3Keys(UnrotatedKeys):
    """Those of config.json, where no layer has a window."""

    use_sliding_window: Annotated[bool, PlainValidator(without_window)] = False


class SmolLm3(Family):
    """Some layers have no rotary embedding."""

    keys = SmolLm3Keys

    def counted(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """All but what says which layers have a window, if any may have one."""
        return {**super().counted(keys), "use_sliding_window": keys.get("use_sliding_window")}


class Starcoder2Keys(MistralKeys):
    """Those of StarCoder2, whose maps all have biases unless a key says otherwise."""

    qkv_bias: bool = Field(True, alias="use_bias")
    rms_norm_eps: Positive = Field(1e-5, alias="norm_epsilon")
    layer_norm_epsilon: Any = None  # which says nothing here
    norm_type: Literal["layer_norm"] = "layer_norm"
    mlp_type: Literal["default"] = "default"


class Starcoder2(Mistral):
    """LayerNorms, an MLP without a gate, biases; trained without the dropout that its keys name."""

    keys = Starcoder2Keys


def four_times_hidden(size: Any, info: ValidationInfo) -> Any:
    """What an MLP's size is if no key says it."""
    return 4 * info.data.get("hidden_size", 1) if size is None else size


class Gpt2Keys(ConfigKeys):
    """Those of GPT-2, which has other names for them; what would be another function is refused."""

    hidden_size: Width = Field(alias="n_embd")
    intermediate_size: Annotated[Width, BeforeValidator(four_times_hidden)] = Field(cast(int, None), alias="n_inner")
    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] = Field(alias="n_layer")
    num_heads: Width = Field(alias="n_head")
    rms_norm_eps: Positive = Field(1e-5, alias="layer_norm_epsilon")
    max_position: Size = Field(1024, alias="n_positions")
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    reorder_and_upcast_attn: bool = False  # which says how, not what


class Gpt2(Family):
    """LayerNorms, an MLP without a gate, biases, learned positions, matrices that are transposed in files; trained
    without the dropout that its keys name."""

    keys, act_key = Gpt2Keys, "activation_function"

    def counted(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """All but heads of other kinds."""
        return {**super().counted(keys), "num_key_value_heads": None, "head_dim": None}

    def rope_keys(self, config: "ModelConfig") -> dict[str, Any]:
        """None."""
        return {}


class QwenVl(Qwen):
    """Qwen 2 in Qwen2.5-VL: text has three equal positions, by which its rotary embedding (mrope) is the usual one."""

    def counted(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """All, if a window is asked for."""
        ropes = {key: keys[key] for key in ("rope_scaling", "rope_parameters") if isinstance(keys.get(key), Mapping)}
        usual = {
            key: {name: "default" if value == "mrope" else value for name, value in rope.items()}
            for key, rope in ropes.items()
        }
        return super().counted({**keys, **usual})


_SANDWICH = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_GEMMA = Wiring(_SANDWICH, norms="both", norm_offset=1.0, activation="gelu_tanh", scaled=True)
_OF_GEMMA = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "head_dim": 256, "num_key_value_heads": 4}
_OF_GEMMA |= {"tie_word_embeddings": True, "sliding_window": 4096, "max_position_embeddings": 8192}
_OLMO = Wiring(
    Names(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"),
    norms="post",
    wide_qk_norm=True,
)
_OF_GLM = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329,
}
_INSIDE = Names(embed=f"{INSIDE}embed_tokens", layers=f"{INSIDE}layers", norm=f"{INSIDE}norm")
_BESIDE = ("architectures", "model_type", "vision_config", "image_token_index", "image_token_id")
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
        "Gemma2ForCausalLM": Gemma2(
            "gemma2", {**_OF_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, wiring=_GEMMA
        ),
        "Gemma3ForCausalLM": Gemma3(
            "gemma3_text",
            {**_OF_GEMMA, "max_position_embeddings": 131072},
            facts={"qk_norm": True},
            wiring=_GEMMA,
            default_theta=1e6,
        ),
        "Olmo2ForCausalLM": Family(
            "olmo2", {"pad_token_id": 1, "eos_token_id": 50279, "rms_norm_eps": 1e-5}, wiring=_OLMO
        ),
        "Olmo3ForCausalLM": Olmo3(
            "olmo3",
            {"pad_token_id": 1, "eos_token_id": 50279, "rms_norm_eps": 1e-5, "sliding_window": 4096},
            wiring=_OLMO,
            default_theta=5e5,
        ),
        "Cohere2ForCausalLM": Cohere2(
            "cohere2",
            {"bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0, "tie_word_embeddings": True}
            | {"max_position_embeddings": 8192, "sliding_window": 4096},
            interleaved=True,
            wiring=Wiring(layernorm=True, norm_bias=False, parallel=True),
        ),
        "Glm4ForCausalLM": Glm(
            "glm4",
            _OF_GLM,
            partial=True,
            interleaved=True,
            wiring=Wiring(
                Names(
                    attention_post_norm="post_self_attn_layernorm",
                    up=("mlp.gate_up_proj",),
                    mlp_post_norm="post_mlp_layernorm",
                ),
                norms="both",
            ),
        ),
        "GlmForCausalLM": Glm(
            "glm", _OF_GLM, partial=True, interleaved=True, wiring=Wiring(Names(up=("mlp.gate_up_proj",)))
        ),
        "GraniteForCausalLM": Granite("granite", _ENDS),
        "SmolLM3ForCausalLM": SmolLm3(
            "smollm3",
            {"bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 128004, "num_key_value_heads": 4}
            | {"max_position_embeddings": 32768, "tie_word_embeddings": True},
            default_theta=2e6,
        ),
        "Starcoder2ForCausalLM": Starcoder2(
            "starcoder2",
            {"bos_token_id": 50256, "eos_token_id": 50256, "num_key_value_heads": 2, "tie_word_embeddings": True}
            | {"max_position_embeddings": 4096},
            takes=frozenset({"attention_dropout", "residual_dropout", "embedding_dropout"}),
            wiring=Wiring(
                Names(up=("mlp.c_fc",), down="mlp.c_proj"),
                layernorm=True,
                activation="gelu_tanh",
                gated=False,
                all_biased=True,
            ),
        ),
        "GPT2LMHeadModel": Gpt2(
            "gpt2",
            {"bos_token_id": 50256, "eos_token_id": 50256, "tie_word_embeddings": True}
            | {"activation_function": "gelu_new"},
            facts={"qkv_bias": True},
            takes=frozenset({"resid_pdrop", "embd_pdrop", "attn_pdrop"}),
            wiring=Wiring(
                Names(
                    embed="transformer.wte",
                    positions="transformer.wpe",
                    layers="transformer.h",
                    attention_norm="ln_1",
                    qkv=("attn.c_attn",),
                    o="attn.c_proj",
                    mlp_norm="ln_2",
                    up=("mlp.c_fc",),
                    down="mlp.c_proj",
                    norm="transformer.ln_f",
                ),
                layernorm=True,
                activation="gelu_tanh",
                gated=False,
                transposed=True,
                all_biased=True,
            ),
        ),
        "MinistralForCausalLM": Windowed("ministral", {**_ENDS, "num_key_value_heads": 8, "sliding_window": 4096}),
        "Gemma3ForConditionalGeneration": Gemma3(
            "gemma3",
            {**_OF_GEMMA, "max_position_embeddings": 131072, "vocab_size": 262208, "hidden_size": 2304}
            | {"intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8},
            facts={"qk_norm": True},
            wiring=replace(
                _GEMMA, names=replace(_SANDWICH, embed=_INSIDE.embed, layers=_INSIDE.layers, norm=_INSIDE.norm)
            ),
            default_theta=1e6,
            within=Within("gemma3_text", {*_BESIDE, "boi_token_index", "eoi_token_index", "mm_tokens_per_image"}),
        ),
        "Mistral3ForConditionalGeneration": Mistral(
            "mistral3",
            {**_WINDOWS, **_ENDS, "max_position_embeddings": 131072, "num_key_value_heads": 8},
            wiring=Wiring(_INSIDE),
            within=Within(
                "mistral",
                {*_BESIDE, "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"}
                | {"vision_feature_layer"},
            ),
        ),
        "Qwen2_5_VLForConditionalGeneration": QwenVl(
            "qwen2_5_vl",
            {**_WINDOWS, "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "rms_norm_eps": 1e-5}
            | {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_window_layers": 80}
            | {"bos_token_id": 151643, "eos_token_id": 151645},
            facts={"qkv_bias": True},
            takes=frozenset({"attention_bias"}),
            wiring=Wiring(_INSIDE),
            default_theta=1e6,
            within=Within(
                "qwen2_5_vl_text",
                {*_BESIDE, "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"},
                flat=True,
            ),
        ),
    },
    needs=("model_type", "rows"),
)
