"""Architectures: how a family spells its facts in config.json, and what its layers are made of.

A family is a class that answers some of these questions in another way than Llama, and its entry in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo

from llmq.blocks.attention import Attention, Heads, Rotary
from llmq.blocks.head import LogitsReader
from llmq.blocks.mlp import Mlp, SwiGlu
from llmq.blocks.qk_norm import NormedRotary
from llmq.model.config_keys import ConfigKeys, windows_of_layers
from llmq.protocols import Activation
from llmq.row import Row, SublayerRows

if TYPE_CHECKING:
    from llmq.model.config import ModelConfig


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

    keys: ClassVar[type[ConfigKeys]] = ConfigKeys
    hidden_act: ClassVar[str] = "silu"

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
        return NormedRotary(heads, config.rms_norm_eps) if config.qk_norm else Rotary(heads)

    def activation(self, config: ModelConfig) -> Activation:
        """What lies between the two maps of the MLP."""
        return SwiGlu()

    def reader(self, config: ModelConfig, reader: LogitsReader) -> LogitsReader:
        """What reads the logits as the map makes them, on behalf of a `reader` of the model's logits."""
        return reader

    def rows(self, config: ModelConfig, layer: int) -> Iterator[Row]:
        """The parameters of a layer, in the order of the forward pass."""
        c, at = config.hidden_size, SublayerRows("attention", layer)
        yield from Attention.rows(at, c, self.heads(config), self.rotary(config), bias=config.qkv_bias)
        yield from Mlp.rows(SublayerRows("mlp", layer), c, config.intermediate_size)


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


_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_WINDOWS = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}
FAMILIES = {
    "LlamaForCausalLM": Family("llama", _ENDS),
    "MistralForCausalLM": Mistral(
        "mistral", {**_WINDOWS, **_ENDS, "max_position_embeddings": 131072, "num_key_value_heads": 8}
    ),
    "Qwen2ForCausalLM": Qwen("qwen2", _WINDOWS, facts={"qkv_bias": True}, takes=frozenset({"attention_bias"})),
    "Qwen3ForCausalLM": Qwen("qwen3", {**_WINDOWS, "head_dim": 128}, facts={"qk_norm": True}),
}
