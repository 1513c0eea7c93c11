"""Architectures: how a family spells its facts in config.json, and what its layers are made of.

The keys of config.json have types, limits and defaults, and some contradict each other. A family is a class that
answers some of these questions in another way than Llama, and its entry in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainValidator, ValidationInfo

from llmq.blocks.attention import Heads, Rotary
from llmq.blocks.head import LogitsReader
from llmq.blocks.mlp import SwiGlu
from llmq.blocks.qk_norm import HeadNorms, NormedRotary
from llmq.blocks.stream import Added, Normed, RmsNorm
from llmq.model.wiring import LLAMA, Wiring
from llmq.protocols import Into, Onto
from llmq.row import Part, Row, SublayerRows
from llmq.tensor import DTYPES

if TYPE_CHECKING:
    from llmq.model.config import ModelConfig


TORCH_NAMES = {name: DTYPES[name].name for name in ("bf16", "fp16", "fp32")}
DTYPE_NAMES = {torch: ours for ours, torch in TORCH_NAMES.items()}
LARGEST = 2**31 - 1  # token ids and sizes are held in int32
# Beyond any model, and planned in seconds: a damaged config.json would be planned for hours.
MAX_LAYERS = 256  # twice those of the deepest, at 40 ms of planning each
MAX_WIDTH = 2**20  # of what a layer computes
MAX_VOCABULARY = 2**24


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `kind` is `default`, `linear` (positions / factor) or `llama3` (frequency-dependent factor)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def _one_kind(given: Any, info: ValidationInfo) -> Any:
    """A rope object with its kind as `rope_type`; `type` is the older name.

    Its `original_max_position_embeddings` is that of the config's top level where there is one, as in transformers 5.
    """
    if not isinstance(given, Mapping):
        raise ValueError("must be an object or null")
    if given and all(isinstance(value, dict) for value in given.values()):
        raise ValueError("rotary embedding that differs between layers is not supported")
    found = {key: value for key, value in given.items() if value is not None}
    if found.get("partial_rotary_factor", 1) != 1:
        raise ValueError("partial rotary embedding is not supported")
    kinds = [found[key] for key in ("rope_type", "type") if key in found]
    if kinds[1:] and kinds[0] != kinds[1]:
        raise ValueError(f"type {kinds[1]!r} contradicts rope_type {kinds[0]!r}")
    kind = kinds[0] if kinds else None if "factor" in found else "default"
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ValueError(f"rope_type {kind!r} is not supported; known are {', '.join(ROPE_KEYS)}")
    outer = info.data.get("original_max_position")
    return {**found, **({"original_max_position_embeddings": outer} if outer else {}), "rope_type": kind}


def _above_low(high: float, info: ValidationInfo) -> float:
    low = info.data.get("low_freq_factor", 0)
    if high <= low:
        raise ValueError(f"must be above low_freq_factor ({low:g})")
    return high


def _one_rope(newer: Any, info: ValidationInfo) -> RopeConfig:
    """From `rope_theta` and `rope_scaling` (4) and `rope_parameters` (5), which must agree."""
    named = {"rope_scaling.": info.data.get("rope_scaling"), "rope_parameters.": newer}
    thetas = {"rope_theta": info.data.get("rope_theta")}
    thetas |= {f"{key}rope_theta": rope.rope_theta for key, rope in named.items() if rope}
    thetas = {key: theta for key, theta in thetas.items() if theta}
    if len(set(thetas.values())) > 1:
        said = ", ".join(f"{key} is {theta:g}" for key, theta in thetas.items())
        raise ValueError(f"the rotary base contradicts itself: {said}")
    kinds = [rope.config() for rope in named.values() if rope]
    if len(set(kinds)) > 1:
        raise ValueError("contradicts rope_scaling")
    return replace((kinds or [RopeConfig()])[0], theta=next(iter(thetas.values()), 10000.0))


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


Size = Annotated[int, Field(ge=1, le=LARGEST)]
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Positive = Annotated[float, Field(gt=0, lt=1e30, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1, lt=1e30, allow_inf_nan=False)]


class RopeKeys(BaseModel, strict=True):
    """A `rope_scaling` or `rope_parameters` object, with the names of RopeConfig."""

    kind: Literal["default"] = Field(alias="rope_type")
    rope_theta: Positive | None = None

    def config(self) -> RopeConfig:
        """What it asks for, without its base."""
        return RopeConfig(**{name: value for name, value in self if name != "rope_theta"})


class LinearRopeKeys(RopeKeys):
    """Positions are divided."""

    kind: Literal["linear"] = Field(alias="rope_type")  # type: ignore[assignment]
    factor: Factor


class Llama3RopeKeys(LinearRopeKeys):
    """Each frequency has a factor of its own."""

    kind: Literal["llama3"] = Field(alias="rope_type")  # type: ignore[assignment]
    low_freq_factor: Positive
    high_freq_factor: Annotated[Positive, AfterValidator(_above_low)]
    original_max_position: Size = Field(alias="original_max_position_embeddings")


ROPE_KEYS: dict[str, type[RopeKeys]] = {"default": RopeKeys, "linear": LinearRopeKeys, "llama3": Llama3RopeKeys}
Kinds = Annotated[RopeKeys | LinearRopeKeys | Llama3RopeKeys, Field(discriminator="kind")]
Rope = Annotated[Kinds, BeforeValidator(_one_kind)]
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
    rope_theta: Positive | None = None
    original_max_position: Size | None = Field(None, alias="original_max_position_embeddings")
    rope_scaling: Rope | None = None
    rope: Annotated[Rope | None, AfterValidator(_one_rope)] = Field(None, alias="rope_parameters")
    use_sliding_window: bool = False
    sliding_window: Size | None = None
    max_window_layers: Annotated[int, Field(ge=0, le=LARGEST)] = 28
    windows: Annotated[Any, PlainValidator(windows_of_layers)] = Field(None, alias="layer_types")


@dataclass(frozen=True)
class Family:
    """Llama, and what differs from it in others.

    `model_type` is its name in config.json, `defaults` is what transformers takes for absent keys. `facts` are those of
    a ModelConfig that no key says; `takes` names keys that are refused in other families.
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    takes: frozenset[str] = frozenset()
    wiring: Wiring = LLAMA

    keys: ClassVar[type[ConfigKeys]] = ConfigKeys
    act_key: ClassVar[str] = "hidden_act"  # of config.json, for the activation

    def counted(self, keys: Mapping[str, Any]) -> Mapping[str, Any]:
        """What keys of config.json say, those of them that say nothing in this family left out or None."""
        return {**keys, "use_sliding_window": None, "max_window_layers": 0, "sliding_window": None}

    def window_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The keys that say which layers have which sliding window."""
        return {}

    def heads(self, config: ModelConfig) -> Heads:
        """The heads of attention."""
        return Heads(config.num_heads, config.num_kv_heads, config.head_dim)

    def rotary(self, config: ModelConfig) -> Rotary:
        """What happens to queries and keys before attention."""
        heads = self.heads(config)
        return NormedRotary(HeadNorms(heads, self.norm(config))) if config.qk_norm else Rotary(heads)

    def activation(self, config: ModelConfig) -> SwiGlu:
        """What lies between the two maps of the MLP."""
        return SwiGlu()

    def reader(self, config: ModelConfig, reader: LogitsReader) -> LogitsReader:
        """What reads the logits as the map makes them, on behalf of a `reader` of the model's logits."""
        return reader

    def head_rows(self, config: ModelConfig) -> Iterator[Row]:
        """The parameters of the norm before the head."""
        yield Row(
            "head.norm",
            (config.hidden_size,),
            (Part(f"{self.wiring.names.norm}.weight", 0, config.hidden_size),),
            "ones",
            decay=False,
        )

    def norm(self, config: ModelConfig) -> RmsNorm:
        """The norm before the head, and before sublayers."""
        return RmsNorm(config.rms_norm_eps)

    def into(self, config: ModelConfig) -> Into:
        """What a sublayer's first linear map reads of the residual stream."""
        return Normed(self.norm(config))

    def onto(self, config: ModelConfig) -> Onto:
        """How a sublayer's last linear map is added to the residual stream."""
        return Added()

    def rows(self, config: ModelConfig, layer: int) -> Iterator[Row]:
        """The parameters of a layer, in the order of the forward pass."""
        c, f, names, heads = config.hidden_size, config.intermediate_size, self.wiring.names, self.heads(config)
        q, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        at = SublayerRows("attention", layer, names.layers)
        yield from self.into(config).rows(at, c, names.attention_norm)
        yield from at.linear("qkv", c, _sizes(names.qkv, q, kv, kv), bias=config.qkv_bias)
        yield from self.rotary(config).rows(at)
        yield from at.linear("o", q, {names.o: c}, init="residual")
        yield from self.onto(config).rows(at, c, names.attention_post_norm)
        at = SublayerRows("mlp", layer, names.layers)
        yield from self.into(config).rows(at, c, names.mlp_norm)
        yield from at.linear("up", c, _sizes(names.up, f, f))
        yield from at.linear("down", f, {names.down: c}, init="residual")
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

    keys = MistralKeys

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
