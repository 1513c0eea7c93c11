"""Virtual tokens: trained vectors at N positions before every document, which instruct a frozen model.

Prompt tuning (Lester et al., "The Power of Scale for Parameter-Efficient Prompt Tuning", 2021) trains their embeddings.
Prefix tuning (Li and Liang, "Prefix-Tuning: Optimizing Continuous Prompts for Generation", 2021; without its
reparametrization P-tuning v2, Liu et al., 2022) trains their keys and values in every layer: as in PEFT those that
attention reads, after norms and the rotary embedding. Real tokens are at positions from N on.

In PEFT's format they are one tensor `prompt_embeddings`, of a prompt (N,C), of a prefix (N,L*2*Hkv*Hd). A row of a
prefix has the keys of the first layer's heads, then the values, then those of the next layer. What P-tuning and a
projected prefix are made of PEFT does not store, but only the vectors that come of it: these are read as a prompt and a
prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from llmq.adapters.method import Method
from llmq.adapters.peft_format import About, AdapterFile, PeftConfig
from llmq.adapters.targets import FILE
from llmq.blocks.attention import Rotary
from llmq.blocks.embed import Embed
from llmq.blocks.virtual_tokens import PrefixedRotary, PromptedEmbed
from llmq.files.source import Values
from llmq.files.tensor_files import Stored
from llmq.model.config import ModelConfig
from llmq.options.adapters import AdapterOptions
from llmq.row import Part, Row

PROMPT_ROW = "embed.prompt"
VIRTUAL = -1  # in place of a virtual token among those of a prompt
TENSOR = "prompt_embeddings"


@dataclass(frozen=True)
class VirtualTokens(Method):
    """Virtual tokens before each document."""

    num_virtual: int

    name: ClassVar[str]  # the method's, in checkpoints
    kind: ClassVar[str]  # what is trained
    option: ClassVar[str]  # which says how many
    unmergeable = "virtual tokens, which are a part of no weight"

    @classmethod
    def of_options(cls, options: AdapterOptions, config: ModelConfig, steps: int) -> VirtualTokens | None:
        """As many as the option says."""
        count = getattr(options, cls.option)
        return None if count is None else cls(count, base=options.base_dtype)

    @classmethod
    def of_peft(
        cls, about: PeftConfig, tensors: dict[str, Stored], config: ModelConfig
    ) -> tuple[VirtualTokens, list[str]]:
        """What a config of virtual tokens and its tensor say, and what is wrong with them."""
        found = cls(about.num_virtual_tokens or 0)
        wanted = (found.num_virtual, found.width(config))
        problems = [f"{name} is no part of virtual tokens" for name in tensors if name != TENSOR]
        if (tensor := tensors.get(TENSOR)) is None:
            return found, [*problems, f"missing: {TENSOR}"]
        if tensor.shape != wanted or not found.num_virtual:
            has = f"{TENSOR} has shape {list(tensor.shape)}"
            problems.append(f"{has}, its config and the model ask for {list(wanted)}")
        return found, problems

    def identity(self) -> dict[str, Any]:
        """What makes the run compute what it computes."""
        return {**super().identity(), "method": self.name, "virtual tokens": self.num_virtual}

    def words(self) -> str:
        """What is trained, of how many tokens."""
        return f"{self.kind} of {self.num_virtual} virtual tokens before each document"

    def file(self, rows: Sequence[Row], config: ModelConfig, model: Values | None) -> AdapterFile:
        """The rows of virtual tokens, side by side."""
        own, about = [row for row in rows if row.file == FILE], self.peft_config(config)
        return AdapterFile(own, about, lambda tensors: {TENSOR: np.concatenate([*tensors.values()], axis=1)})

    def peft_config(self, config: ModelConfig) -> About:
        """What PEFT's configs of both have."""
        sizes = {"num_virtual_tokens": self.num_virtual, "num_transformer_submodules": 1}
        return {**sizes, "num_layers": config.num_layers}

    def width(self, config: ModelConfig) -> int:
        """Numbers of a virtual token in files."""
        raise NotImplementedError


@dataclass(frozen=True)
class Prompt(VirtualTokens):
    """Their embeddings (N,C)."""

    name, option = "prompt", "prompt_tuning"
    kind = "Embeddings"
    peft_types: ClassVar[tuple[str, ...]] = ("PROMPT_TUNING", "P_TUNING")

    def embed(self, base: Embed, config: ModelConfig) -> PromptedEmbed:
        """The embedding, with the virtual tokens' in place of those of their positions."""
        return PromptedEmbed(base, config.hidden_size, self.num_virtual)

    def with_own(self, rows: Sequence[Row], config: ModelConfig) -> Sequence[Row]:
        """That of the virtual tokens before the rows of a model."""
        part, shape = Part(TENSOR, 0, self.num_virtual), (self.num_virtual, config.hidden_size)
        return (Row(PROMPT_ROW, shape, (part,), "unit", decay=True, file=FILE), *rows)

    def width(self, config: ModelConfig) -> int:
        """Channels of an embedding."""
        return config.hidden_size

    def peft_config(self, config: ModelConfig) -> About:
        """PEFT's PromptTuningConfig."""
        sizes = {"token_dim": config.hidden_size, "num_attention_heads": config.num_heads}
        about = super().peft_config(config)
        return {"peft_type": "PROMPT_TUNING", **about, **sizes, "prompt_tuning_init": "RANDOM"}


@dataclass(frozen=True)
class Prefix(VirtualTokens):
    """Their keys and values in every layer (N,2*Hkv*Hd)."""

    name, option = "prefix", "prefix_tuning"
    kind = "Keys and values in every layer"
    peft_types: ClassVar[tuple[str, ...]] = ("PREFIX_TUNING",)

    def rotary(self, base: Rotary) -> PrefixedRotary:
        """Keys and values, with the virtual tokens' in place of those of their positions."""
        return PrefixedRotary(base, self.num_virtual)

    def with_own(self, rows: Sequence[Row], config: ModelConfig) -> Sequence[Row]:
        """The rows of a model; before those of a layer, its virtual tokens' keys and values."""
        found, done = [], set[int | None]([None])
        for row in rows:
            if row.layer not in done:
                done.add(row.layer)
                name, shape = f"layers.{row.layer}.attention.prefix", (self.num_virtual, prefix_width(config))
                order = config.rope.order(config.head_dim, config.num_kv_heads)  # of keys, not of the values after them
                part = Part(f"model.{name}", 0, self.num_virtual, order and replace(order, axis=1))
                found.append(Row(name, shape, (part,), "unit", decay=True, layer=row.layer, file=FILE))
            found.append(row)
        return found

    def columns(self, config: ModelConfig) -> Mapping[str, slice]:
        """A layer's keys and values."""
        width = prefix_width(config)
        starts = {f"model.layers.{n}.attention.prefix": n * width for n in range(config.num_layers)}
        return {name: slice(start, start + width) for name, start in starts.items()}

    def width(self, config: ModelConfig) -> int:
        """Keys and values of all layers."""
        return config.num_layers * prefix_width(config)

    def peft_config(self, config: ModelConfig) -> About:
        """PEFT's PrefixTuningConfig."""
        width = config.num_kv_heads * config.head_dim
        sizes = {"token_dim": width, "num_attention_heads": config.num_kv_heads, "encoder_hidden_size": width}
        about = super().peft_config(config)
        return {"peft_type": "PREFIX_TUNING", **about, **sizes, "prefix_projection": False}


def prefix_width(config: ModelConfig) -> int:
    """Channels of a virtual token's keys and values in a layer."""
    return 2 * config.num_kv_heads * config.head_dim
