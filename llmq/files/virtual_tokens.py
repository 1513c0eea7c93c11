"""Virtual tokens in PEFT's format: one tensor `prompt_embeddings`, of a prompt (N,C), of a prefix (N,L*2*Hkv*Hd).

A row of a prefix has the keys of the first layer's heads, then the values, then those of the next layer. What P-tuning
and a projected prefix are made of PEFT does not store, but only the vectors that come of it: these are read as a prompt
and a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmq.files import weight_files
from llmq.files.huggingface import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Export, write_json, write_tensors
from llmq.files.source import Values
from llmq.files.tensor_files import Stored
from llmq.model.adapters import Adapters
from llmq.model.config import ModelConfig
from llmq.model.parameters import parameter_rows
from llmq.model.virtual_tokens import PREFIX, PROMPT, PROMPT_ROW, prefix_width, with_virtual
from llmq.row import Part, Row

METHODS = {"PROMPT_TUNING": PROMPT, "P_TUNING": PROMPT, "PREFIX_TUNING": PREFIX}  # by PEFT's name
TENSOR = "prompt_embeddings"


def checked_virtual(
    about: dict[str, Any], tensors: dict[str, Stored], config: ModelConfig
) -> tuple[Adapters, list[str]]:
    """What a config of virtual tokens and its tensor say, and what is wrong with them."""
    method, count = METHODS[about["peft_type"]], int(about.get("num_virtual_tokens") or 0)
    width = config.num_layers * prefix_width(config) if method == PREFIX else config.hidden_size
    problems = [f"{name} is no part of virtual tokens" for name in tensors if name != TENSOR]
    if (tensor := tensors.get(TENSOR)) is None:
        problems.append(f"missing: {TENSOR}")
    else:
        if tensor.shape != (count, width) or not count:
            wanted = f"its config and the model ask for {[count, width]}"
            problems.append(f"{TENSOR} has shape {list(tensor.shape)}, {wanted}")
        if tensor.dtype not in weight_files.FILE_DTYPES:
            problems.append(f"{TENSOR} is stored as {tensor.dtype}; known are {', '.join(weight_files.FILE_DTYPES)}")
    return Adapters(0, 1.0, (), method=method, num_virtual=count), problems


def columns_of(adapters: Adapters, config: ModelConfig) -> dict[str, slice]:
    """The columns of the tensor that are each of our parts, by name."""
    found, start = {}, 0
    for row in _rows(adapters, config):
        found[row.parts[0].name] = slice(start, start + row.shape[1])
        start += row.shape[1]
    return found


def _rows(adapters: Adapters, config: ModelConfig) -> tuple[Row, ...]:
    """The rows of virtual tokens, layer by layer."""
    layers = [Row(str(n), (), (), "", decay=False, layer=n) for n in range(config.num_layers)]
    return tuple(row for row in with_virtual(layers, adapters, config) if row.parts)


def virtual_config(adapters: Adapters, config: ModelConfig, base: str, revision: str | None) -> dict[str, Any]:
    """PEFT's PromptTuningConfig or PrefixTuningConfig."""
    about = {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "num_virtual_tokens": adapters.num_virtual,
        "num_transformer_submodules": 1,
        "num_layers": config.num_layers,
        "inference_mode": True,
    }
    if adapters.method == PROMPT:
        sizes = {"token_dim": config.hidden_size, "num_attention_heads": config.num_heads}
        return {"peft_type": "PROMPT_TUNING", **about, **sizes, "prompt_tuning_init": "RANDOM"}
    width = config.num_kv_heads * config.head_dim
    sizes = {"token_dim": width, "num_attention_heads": config.num_kv_heads, "encoder_hidden_size": width}
    return {"peft_type": "PREFIX_TUNING", **about, **sizes, "prefix_projection": False}


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
