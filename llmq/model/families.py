"""Architectures: how a family spells its facts in config.json, and what its layers are made of.

The keys of config.json have types, limits and defaults, and some contradict each other. A family is a class that
answers some of these questions in another way than Llama, and its entry in `FAMILIES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainValidator, ValidationInfo

from llmq.blocks.attention import Heads, Rotary
from llmq.blocks.branches import Beside, LayerNorm, PlacedEmbed, PostNorm, Scaled, ScaledEmbed, SharedNorm, Unnormed
from llmq.blocks.capped import Capped
from llmq.blocks.embed import Embed
from llmq.blocks.head import LogitsReader
from llmq.blocks.mlp import Glu, Plain
from llmq.blocks.qk_norm import HeadNorms, NormedRotary, WideNorms
from llmq.blocks.stream import Added, Normed, RmsNorm
from llmq.model.key_types import LARGEST, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, Positive, Size, Width
from llmq.model.multimodal import TEXT_ONLY, TextOnly
from llmq.model.rope_keys import ROPE_KEYS, Rope, one_local_rope, one_rope, partial_of_family, unrotated_of_list
from llmq.model.wiring import LLAMA, Wiring
from llmq.protocols import Activation, Into, Onto
from llmq.row import HeadOrder, Part, Row, SublayerRows
from llmq.tensor import DTYPES

if TYPE_CHECKING:
    from llmq.model.config import ModelConfig


TORCH_NAMES = {name: DTYPES[name].name for name in ("bf16", "fp16", "fp32")}
DTYPE_NAMES = {torch: ours for ours, torch in TORCH_NAMES.items()}


def _our_dtype(value: Any, info: ValidationInfo) -> str | None:
    """Of `torch_dtype`, then `dtype`: the storage type that both name; fp32 where neither does, as transformers."""
    name, older = str(value).removeprefix("torch."), info.data.get("torch_dtype")
    if value is None:
        return older or ("fp32" if info.field_name == "dtype" else None)
    if name not in DTYPE_NAMES:
        raise ValueError(f"is not supported; known are {', '.join(DTYPE_NAMES)}")
    if older and older != DTYPE_NAMES[name]:
        raise ValueError(f"contradicts torch_dtype ({TORCH_NAMES[older]!r}): remove one")
    return DTYPE_NAMES[name]


def _token_ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) and v <= LARGEST for v in values):
        raise ValueError("must be a token id, a list of token ids, or null")
    return tuple(v for v in values if v >= 0)  # negative ids are an old way to say "none"


def _kv_heads(value: Any, info: ValidationInfo) -> Any:
    heads = info.data.get("num_heads", 1)
    if isinstance(value, int) and value > 0 and heads % value:
        raise ValueError(f"does not divide num_attention_heads ({heads})")
    return heads if value is None else value


def _head_dim(value: Any, info: ValidationInfo) -> Any:
    hidden, heads = info.data.get("hidden_size", 2), info.data.get("num_heads", 1)
    if value is None and hidden % heads:
        raise ValueError(f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads})")
    value = hidden // heads if value is None else value
    if isinstance(value, int) and value % 2:
        raise ValueError(f"is {value}, but rotary embedding needs an even number")
    if isinstance(value, int) and heads * value > MAX_WIDTH:
        raise ValueError(f"times num_attention_heads ({heads}) is above {MAX_WIDTH}")
    return value


def windows_of_layers(listed: Any, info: ValidationInfo) -> tuple[int | None, ...]:
    """Sliding window of each layer, () where all attend in full."""
    keys = info.data
    if not {"num_layers", "sliding_window", "max_window_layers"} <= keys.keys():
        return ()  # one of them is wrong
    window, first = keys["sliding_window"], keys["max_window_layers"]
    kinds = ["sliding_attention" if window and n >= first else "full_attention" for n in range(keys["num_layers"])]
    return listed_windows(kinds if listed is None else listed, info)


def listed_windows(listed: Any, info: ValidationInfo) -> tuple[int | None, ...]:
    """Sliding window of each layer whose kind is listed, () where all attend in full."""
    layers, window = info.data.get("num_layers"), info.data.get("sliding_window")
    if not isinstance(listed, list) or len(listed) != layers:
        raise ValueError(f"must be a list of num_hidden_layers ({layers}) names")
    if unknown := sorted({repr(kind) for kind in listed} - {"'sliding_attention'", "'full_attention'"}):
        raise ValueError(f"{', '.join(unknown)} is not supported")
    if "sliding_attention" in listed and window is None:
        raise ValueError("asks for sliding_attention, but no sliding window is in use")
    found = tuple(window if kind == "sliding_attention" else None for kind in listed)
    return found if any(found) else ()


TorchDtype = Annotated[str | None, PlainValidator(_our_dtype)]
TokenId = Annotated[int | None, PlainValidator(lambda value: next(iter(_token_ids(value)), None))]


class ConfigKeys(BaseModel, strict=True, validate_default=True):
    """The keys of config.json that count, with the names of ModelConfig. A check may look at the keys above its own."""

    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCABULARY)]
    hidden_size: Width
    intermediate_size: Width
    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] = Field(alias="num_hidden_layers")
    num_heads: Width = Field(alias="num_attention_heads")
    num_kv_heads: Annotated[Size, BeforeValidator(_kv_heads)] = Field(cast(int, None), alias="num_key_value_heads")
    head_dim: Annotated[Width, BeforeValidator(_head_dim)] = cast(int, None)
    rms_norm_eps: Positive = 1e-6
    max_position: Size = Field(2048, alias="max_position_embeddings")
    tie_embeddings: bool = Field(False, alias="tie_word_embeddings")
    torch_dtype: TorchDtype = None
    dtype: TorchDtype = None
    bos_token_id: TokenId = None
    eos_token_ids: Annotated[Any, PlainValidator(_token_ids)] = Field(None, alias="eos_token_id")
    pad_token_id: TokenId = None
    partial: Annotated[Positive, Field(le=1), AfterValidator(partial_of_family)] = Field(
        1.0, alias="partial_rotary_factor"
    )
    rope_theta: Positive | None = None
    original_max_position: Size | None = Field(None, alias="original_max_position_embeddings")
    rope_scaling: Rope | None = None
    rope: Annotated[Rope | None, AfterValidator(one_rope)] = Field(None, alias="rope_parameters")
    use_sliding_window: bool = False
    sliding_window: Size | None = None
    max_window_layers: Annotated[int, Field(ge=0, le=LARGEST)] = 28
    window_pattern: Size = Field(1, alias="sliding_window_pattern")  # which says nothing here
    windows: Annotated[Any, PlainValidator(windows_of_layers)] = Field(None, alias="layer_types")


class LocalRopeKeys(ConfigKeys):
    """Those of config.json where layers with a window have a rope of their own; `parted` gives it a name."""

    rope_local_base_freq: Positive | None = None
    local_rope: Annotated[Rope | None, AfterValidator(one_local_rope)] = Field(None, alias="local_rope_parameters")


class UnrotatedKeys(ConfigKeys):
    """Those of config.json where some layers have no rope."""

    no_rope_layer_interval: Size = 4
    unrotated: Annotated[Any, PlainValidator(unrotated_of_list)] = Field(None, alias="no_rope_layers")


@dataclass(frozen=True)
class Family:
    """Llama, and what differs from it in others.

    `model_type` is its name in config.json, `defaults` is what transformers takes for absent keys. `facts` are those of
    a ModelConfig that no key says; `takes` names keys that are refused in other families; `within` says what else a
    folder may be than a language model. Of the rotary embedding: its base where no key says one, whether a part of the
    channels may be turned, whether pairs are `interleaved` in files, and names of kinds that are others here.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    takes: frozenset[str] = frozenset()
    wiring: Wiring = LLAMA
    within: TextOnly = TEXT_ONLY
    default_theta: float = 10000.0
    partial: bool = False
    interleaved: bool = False
    rope_kinds: Mapping[str, str] = field(default_factory=dict)

    keys: ClassVar[type[ConfigKeys]] = ConfigKeys
    act_key: ClassVar[str] = "hidden_act"  # of config.json, for the activation

    def counted(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """What keys of config.json say, those of them that say nothing in this family left out or None."""
        return {**keys, "use_sliding_window": None, "max_window_layers": 0, "sliding_window": None}

    def window_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The keys that say which layers have which sliding window."""
        return {}

    def rope_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The keys of the rotary embedding, as transformers 4 and 5 spell them."""
        rope, more = config.rope, dict[str, Any]()
        written = ROPE_KEYS[rope.kind].written(rope)
        scaling = {key: value for key, value in written.items() if key not in ("rope_theta", "partial_rotary_factor")}
        if self.partial:
            more["partial_rotary_factor"] = rope.partial
        if "original_max_position_embeddings" in self.defaults and "original_max_position_embeddings" in scaling:
            more["original_max_position_embeddings"] = rope.original_max_position
        four = {"rope_theta": rope.theta, "rope_scaling": None if rope.kind == "default" else scaling}
        if config.local_rope is not None:
            local = config.local_rope
            written = {"full_attention": written, "sliding_attention": ROPE_KEYS[local.kind].written(local)}
            more |= {"rope_local_base_freq": local.theta} if issubclass(self.keys, LocalRopeKeys) else {}
        if issubclass(self.keys, UnrotatedKeys):
            more["no_rope_layers"] = [int(layer not in config.unrotated) for layer in range(config.num_layers)]
        return {**four, "rope_parameters": written, **more}

    def heads(self, config: ModelConfig) -> Heads:
        """The heads of attention."""
        scales = config.scales
        of_scores = (scales.of_scores, scales.attn_logit_softcapping)
        return Heads(config.num_heads, config.num_kv_heads, config.head_dim, *of_scores)

    def rotary(self, config: ModelConfig, layer: int) -> Rotary:
        """What happens to queries and keys of a layer before attention."""
        heads, table = self.heads(config), config.table(layer)
        if not (config.qk_norm or self.wiring.wide_qk_norm):
            return Rotary(heads, table)
        return NormedRotary((HeadNorms if config.qk_norm else WideNorms)(heads, self.norm(config)), table)

    def activation(self, config: ModelConfig) -> Activation:
        """What lies between the two maps of the MLP."""
        return (Glu if self.wiring.gated else Plain)(self.wiring.activation)

    def reader(self, config: ModelConfig, reader: LogitsReader) -> LogitsReader:
        """What reads the logits as the map makes them, on behalf of a `reader` of the model's logits."""
        cap, factor = config.scales.final_logit_softcapping, config.scales.of_logits
        return reader if cap is None and factor == 1 else Capped(reader, cap or math.inf, factor)

    def position_rows(self, config: ModelConfig) -> Iterator[Row]:
        """The table of learned positions (max_position,C), where there is one."""
        if name := self.wiring.names.positions:
            part, shape = Part(f"{name}.weight", 0, config.max_position), (config.max_position, config.hidden_size)
            yield Row("embed.positions", shape, (part,), "normal", decay=True)

    def head_rows(self, config: ModelConfig) -> Iterator[Row]:
        """The parameters of the norm before the head."""
        return self.norm(config).rows(SublayerRows("head"), config.hidden_size, self.wiring.names.norm)

    def norm(self, config: ModelConfig) -> RmsNorm:
        """The norm before the head, and before sublayers."""
        eps, of_weight = config.rms_norm_eps, self.wiring.norm_offset
        return LayerNorm(eps, has_bias=self.wiring.norm_bias) if self.wiring.layernorm else RmsNorm(eps, of_weight)

    def into(self, config: ModelConfig) -> Into:
        """What attention's first linear map reads of the residual stream."""
        if self.wiring.norms == "post":
            return Unnormed()
        return (SharedNorm if self.wiring.parallel else Normed)(self.norm(config))

    def mlp_into(self, config: ModelConfig) -> Into:
        """What the MLP's first linear map reads."""
        return Beside() if self.wiring.parallel else self.into(config)

    def onto(self, config: ModelConfig) -> Onto:
        """How a sublayer's last linear map is added to the residual stream."""
        if self.wiring.norms != "pre":
            return PostNorm(self.norm(config))
        factor = config.scales.residual_multiplier
        return Added() if factor == 1 else Scaled(factor)

    def embed(self, config: ModelConfig, dtype: str, embed: Embed, around: Callable[[Embed], Embed]) -> Embed:
        """The embedding of a model in `dtype` by that of its tokens, `embed`, with what a run puts `around` it."""
        c, factor = config.hidden_size, config.scales.embedding_multiplier
        if self.wiring.scaled:  # by a number of the model's dtype, as in transformers
            embed = ScaledEmbed(embed, c, float(np.asarray(c**0.5, DTYPES[dtype])))
        embed = around(embed)
        if self.wiring.names.positions:
            embed = PlacedEmbed(embed, c)
        return embed if factor == 1 else ScaledEmbed(embed, c, factor)

    def orders(self, config: ModelConfig) -> dict[str, HeadOrder]:
        """The tensors of attention whose channels are held in another order than in files."""
        heads, (first, *others) = self.heads(config), self.wiring.names.qkv
        of_heads = [heads.num_heads + heads.num_kv_heads, None, None, None]  # of a fused one all but the values
        named = zip(
            (first, *others[:1], "self_attn.q_norm", "self_attn.k_norm"), of_heads[bool(others) :], strict=False
        )
        found = {name: config.rope.order(config.head_dim, turned) for name, turned in named}
        return {name: order for name, order in found.items() if order is not None}

    def rows(self, config: ModelConfig, layer: int) -> Iterator[Row]:
        """The parameters of a layer, in the order of the forward pass."""
        c, f, names, heads = config.hidden_size, config.intermediate_size, self.wiring.names, self.heads(config)
        q, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        also, of_layer = config.qkv_bias and self.wiring.all_biased, (f"{names.layers}.{layer}.", layer)
        at = SublayerRows(f"layers.{layer}.attention", *of_layer, self.orders(config), self.wiring.transposed)
        yield from self.into(config).rows(at, c, names.attention_norm)
        yield from at.linear("qkv", c, _sizes(names.qkv, q, kv, kv), bias=config.qkv_bias)
        yield from self.rotary(config, layer).rows(at)
        yield from at.linear("o", q, {names.o: c}, init="residual", bias=also)
        yield from self.onto(config).rows(at, c, names.attention_post_norm)
        at = SublayerRows(f"layers.{layer}.mlp", *of_layer, transposed=self.wiring.transposed)
        yield from self.mlp_into(config).rows(at, c, names.mlp_norm)
        yield from at.linear("up", c, _sizes(names.up, *[f] * self.activation(config).maps), bias=also)
        yield from at.linear("down", f, {names.down: c}, init="residual", bias=also)
        yield from self.onto(config).rows(at, c, names.mlp_post_norm)


def _sizes(names: tuple[str, ...], *sizes: int) -> dict[str, int]:
    """The outputs of maps that are computed as one, each by its name, or all by that of the one that has them."""
    return dict(zip(names, sizes, strict=True)) if names[1:] else {names[0]: sum(sizes)}


def _one_for_all(windows: tuple[int | None, ...], info: ValidationInfo) -> tuple[int | None, ...]:
    window, layers = info.data.get("sliding_window"), info.data.get("num_layers")
    if window and layers and windows != (window,) * layers:
        raise ValueError(f"contradicts sliding_window ({window}), which holds for all layers of Mistral")
    return windows


class MistralKeys(ConfigKeys):
    """Those of config.json where the layers, if they are listed, are all of one kind."""

    windows: Annotated[Any, PlainValidator(windows_of_layers), AfterValidator(_one_for_all)] = Field(
        None, alias="layer_types"
    )


class Mistral(Family):
    """All layers have the same window."""

    keys: ClassVar[type[ConfigKeys]] = MistralKeys

    def counted(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """All but which layers have a window."""
        return {**keys, "use_sliding_window": None, "max_window_layers": 0}

    def window_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The window."""
        return {"sliding_window": next(filter(None, config.windows), None)}


class Qwen(Family):
    """Layers from one on have a window, or those that are listed; none unless that is asked for."""

    def counted(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """All, if a window is asked for."""
        unused = {} if keys.get("use_sliding_window") is True else {"sliding_window": None, "max_window_layers": None}
        return {**keys, **unused}

    def window_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The window, the first layer that has it, and all that have it."""
        window, sliding = next(filter(None, config.windows), None), [w is not None for w in config.windows]
        if window is None:
            return {"use_sliding_window": False}
        return {
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": sliding.index(True),
            "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        }
