"""Virtual tokens: trained vectors at N positions before every document, by which a frozen model is told what to do.

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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmq.adapters.method import Method
from llmq.adapters.targets import FILE
from llmq.blocks.attention import NormedRotary, PrefixedRotary, Rotary
from llmq.blocks.embed import Embed, PromptedEmbed
from llmq.files import weight_files
from llmq.files.huggingface import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Export, write_json, write_tensors
from llmq.files.source import Values
from llmq.files.tensor_files import Stored
from llmq.model.config import ModelConfig
from llmq.model.parameters import parameter_rows
from llmq.row import Part, Row

PROMPT_ROW = "embed.prompt"
VIRTUAL = -1  # stands for a virtual token among those of a prompt
TENSOR = "prompt_embeddings"


@dataclass(frozen=True)
class VirtualTokens(Method):
    """Virtual tokens before each document."""

    num_virtual: int

    unmergeable = "virtual tokens, which are a part of no weight"

    def identity(self) -> dict[str, Any]:
        """What makes the run compute what it computes."""
        return {**super().identity(), "method": self.name, "virtual tokens": self.num_virtual}

    def words(self) -> str:
        """What is trained, of how many tokens."""
        return f"{self.kind} of {self.num_virtual} virtual tokens before each document"

    def stored_rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """The rows of virtual tokens."""
        return tuple(row for row in rows if row.file == FILE)

    def peft_config(self, config: ModelConfig, base: str, revision: str | None) -> dict[str, Any]:
        """What PEFT's configs of both have."""
        sizes = {"num_virtual_tokens": self.num_virtual, "num_transformer_submodules": 1}
        return {**super().peft_config(config, base, revision), **sizes, "num_layers": config.num_layers}

    @property
    def name(self) -> str:
        """The method's name in checkpoints."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """What is trained, in words."""
        raise NotImplementedError

    def width(self, config: ModelConfig) -> int:
        """Numbers of a virtual token in files."""
        raise NotImplementedError


@dataclass(frozen=True)
class Prompt(VirtualTokens):
    """Their embeddings (N,C)."""

    name = "prompt"
    kind = "Embeddings"

    def embed(self, base: Embed, config: ModelConfig) -> PromptedEmbed:
        """The embedding, with the virtual tokens' in place of those of their positions."""
        return PromptedEmbed(base, config.hidden_size, self.num_virtual)

    def with_own(self, rows: Sequence[Row], config: ModelConfig) -> Sequence[Row]:
        """The rows of a model behind that of the virtual tokens."""
        part, shape = Part(TENSOR, 0, self.num_virtual), (self.num_virtual, config.hidden_size)
        return (Row(PROMPT_ROW, shape, (part,), "unit", decay=True, file=FILE), *rows)

    def width(self, config: ModelConfig) -> int:
        """Channels of an embedding."""
        return config.hidden_size

    def peft_config(self, config: ModelConfig, base: str, revision: str | None) -> dict[str, Any]:
        """PEFT's PromptTuningConfig."""
        sizes = {"token_dim": config.hidden_size, "num_attention_heads": config.num_heads}
        about = super().peft_config(config, base, revision)
        return {"peft_type": "PROMPT_TUNING", **about, **sizes, "prompt_tuning_init": "RANDOM"}


@dataclass(frozen=True)
class Prefix(VirtualTokens):
    """Their keys and values in every layer (N,2*Hkv*Hd)."""

    name = "prefix"
    kind = "Keys and values in every layer"

    def rotary(self, base: Rotary | NormedRotary) -> PrefixedRotary:
        """Keys and values, with the virtual tokens' in place of those of their positions."""
        return PrefixedRotary(base, self.num_virtual)

    def with_own(self, rows: Sequence[Row], config: ModelConfig) -> Sequence[Row]:
        """The rows of a model, those of a layer behind its virtual tokens' keys and values."""
        found, done = [], set[int | None]([None])
        for row in rows:
            if row.layer not in done:
                done.add(row.layer)
                name, shape = f"layers.{row.layer}.attention.prefix", (self.num_virtual, prefix_width(config))
                part = Part(f"model.{name}", 0, self.num_virtual)
                found.append(Row(name, shape, (part,), "unit", decay=True, layer=row.layer, file=FILE))
            found.append(row)
        return found

    def width(self, config: ModelConfig) -> int:
        """Keys and values of all layers."""
        return config.num_layers * prefix_width(config)

    def peft_config(self, config: ModelConfig, base: str, revision: str | None) -> dict[str, Any]:
        """PEFT's PrefixTuningConfig."""
        width = config.num_kv_heads * config.head_dim
        sizes = {"token_dim": width, "num_attention_heads": config.num_kv_heads, "encoder_hidden_size": width}
        return {
            "peft_type": "PREFIX_TUNING",
            **super().peft_config(config, base, revision),
            **sizes,
            "prefix_projection": False,
        }


KINDS = {"PROMPT_TUNING": Prompt, "P_TUNING": Prompt, "PREFIX_TUNING": Prefix}  # by PEFT's name


def prefix_width(config: ModelConfig) -> int:
    """Channels of a virtual token's keys and values in a layer."""
    return 2 * config.num_kv_heads * config.head_dim


def checked_virtual(
    about: dict[str, Any], tensors: dict[str, Stored], config: ModelConfig
) -> tuple[VirtualTokens, list[str]]:
    """What a config of virtual tokens and its tensor say, and what is wrong with them."""
    found = KINDS[about["peft_type"]](int(about.get("num_virtual_tokens") or 0))
    count, width = found.num_virtual, found.width(config)
    problems = [f"{name} is no part of virtual tokens" for name in tensors if name != TENSOR]
    if (tensor := tensors.get(TENSOR)) is None:
        problems.append(f"missing: {TENSOR}")
    else:
        if tensor.shape != (count, width) or not count:
            wanted = f"its config and the model ask for {[count, width]}"
            problems.append(f"{TENSOR} has shape {list(tensor.shape)}, {wanted}")
        if tensor.dtype not in weight_files.FILE_DTYPES:
            problems.append(f"{TENSOR} is stored as {tensor.dtype}; known are {', '.join(weight_files.FILE_DTYPES)}")
    return found, problems


def columns_of(adapters: Method, config: ModelConfig) -> dict[str, slice]:
    """The columns of the tensor that are each of our parts, by name."""
    found, start = {}, 0
    layers = [Row(str(n), (), (), "", decay=False, layer=n) for n in range(config.num_layers)]
    for row in (row for row in adapters.with_own(layers, config) if row.parts):
        found[row.parts[0].name] = slice(start, start + row.shape[1])
        start += row.shape[1]
    return found


def begun_as(tokens: Callable[[], Sequence[int]], config: ModelConfig, model: Values) -> Values:
    """The values of rows as by `model`, but a prompt is the embeddings of `tokens` (N,), as in PEFT."""
    embedding = parameter_rows(config)[:1]

    def values(rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
        for row, value in model(rows):
            if row.name == PROMPT_ROW:
                ((_, every),) = model(embedding)
                value = every[list(tokens())].astype(np.float32)
            yield row, value

    return values


@dataclass(frozen=True)
class VirtualExport(Export):
    """The export of virtual tokens: PEFT's two files, and the tokenizer's."""

    about: dict[str, Any] = field(default_factory=dict)  # adapter_config.json

    def write_model(self, folder: Path, read: Callable[[Row], np.ndarray]) -> None:
        """Config and weights into a new folder."""
        first = self.rows[0]
        shape = (first.shape[0], sum(row.shape[1] for row in self.rows))
        whole = Row("virtual tokens", shape, (Part(TENSOR, 0, shape[0]),), first.init, decay=True)
        write_tensors(folder / ADAPTER_WEIGHTS, [whole], partial(_joined, read, self.rows), self.dtype)
        write_json(folder / ADAPTER_CONFIG, self.about)


def _joined(read: Callable[[Row], np.ndarray], rows: Sequence[Row], whole: Row) -> np.ndarray:
    """The values of rows side by side."""
    return np.concatenate([read(row) for row in rows], axis=1)
