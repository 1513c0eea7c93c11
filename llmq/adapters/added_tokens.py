"""Rows of added tokens that are trained beside a frozen model, of its embedding and of a head of its own.

In PEFT's format (`trainable_token_indices`) they are `token_adapter.trainable_tokens_delta` (N,C) of a module, whole
rows in place of the module's. llmq holds them as rows of their own, and has zeros for them in the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmq.adapters.targets import FILE
from llmq.files.huggingface import ADAPTER_CONFIG, tokenizer_files
from llmq.files.source import ModelSource, Values
from llmq.files.tensor_files import Stored
from llmq.model.config import ModelConfig, read_json
from llmq.model.parameters import EMBED_ROW, HEAD_ROW, parameter_rows
from llmq.row import Part, Row

KEY = "trainable_token_indices"
DELTA = "token_adapter.trainable_tokens_delta"
TABLES = (EMBED_ROW, HEAD_ROW)
ADDED_ROW = "embed.added"


def added_rows(row: Row, new: range) -> Iterator[Row]:
    """What is trained beside a row of the model, where it is of tokens of which some are `new`."""
    if new and row.name in TABLES:
        part = Part(f"{row.parts[0].name.removesuffix('.weight')}.{DELTA}", 0, len(new))
        yield Row(row.name.replace("weight", "added"), (len(new), row.shape[1]), (part,), "normal", True, file=FILE)


def apart(new: range, config: ModelConfig, model: Values) -> Values:
    """The values of a model's rows, in which those of `new` tokens are zero, and of these as rows of their own."""
    own = {one.name: row for row in parameter_rows(config) for one in added_rows(row, new)}

    def values(rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
        for row in (row for row in rows if row.name in own):
            ((_, value),) = model([own[row.name]])
            yield row, value[new.start : new.stop]
        for row, value in model([row for row in rows if row.name not in own]):
            if row.name in TABLES:
                value[new.start : new.stop] = 0
            yield row, value

    return values if new else model


def new_tokens_config(new: range, config: ModelConfig) -> dict[str, Any]:
    """What PEFT's config says of them."""
    return {KEY: {module.rpartition(".")[2]: [*new] for module in _modules(config)}} if new else {}


def read_new_tokens(
    said: Any, tensors: Mapping[str, Stored], config: ModelConfig
) -> tuple[range, dict[str, Stored], list[str]]:
    """The rows that PEFT's config has, the tensors that are not of these, and what is wrong."""
    others = {name: tensor for name, tensor in tensors.items() if not name.endswith(DELTA)}
    if said is None and len(others) == len(tensors):
        return range(0), others, []
    modules = _modules(config)
    lists = said if isinstance(said, dict) else {modules[0].rpartition(".")[2]: said}
    new, wanted = _range(said), {module.rpartition(".")[2] for module in modules}
    if set(lists) != wanted or any(ids != [*new] for ids in lists.values()) or not new:
        return range(0), others, [f"{KEY} {said}: llmq trains one range of ids, in {' and '.join(sorted(wanted))}"]
    shape, problems = (len(new), config.hidden_size), []
    for name in (f"{module}.{DELTA}" for module in modules):
        if name not in tensors:
            problems.append(f"missing: {name}")
        elif tensors[name].shape != shape or new.stop > config.vocab_size:
            has = f"{name} has shape {list(tensors[name].shape)} up to token {new.stop - 1}"
            problems.append(f"{has}, the config asks for {list(shape)} and the model has {config.vocab_size} rows")
    return new, others, problems


def grown_for(source: ModelSource, adapter: str | Path | None) -> ModelSource:
    """A model with the rows and the tokenizer of the tokens that the adapter of a folder adds."""
    folder = Path(adapter or "")
    path = folder / ADAPTER_CONFIG
    if adapter is None or source.new_rows or not path.is_file() or not (new := _range(read_json(path).get(KEY))):
        return source
    known = source.config.vocab_size
    return replace(
        source,
        config=replace(source.config, vocab_size=max(known, new.stop)),
        tokenizer_folder=folder if tokenizer_files(folder) else source.tokenizer_folder,
        new_rows=range(min(new.start, known), new.stop),
        stored_rows=known,
    )


def _range(said: Any) -> range:
    """From the first to the last of the ids that a config has; none of what is no list of ids."""
    lists = said.values() if isinstance(said, dict) else [said]
    ids = [one for ids in lists if isinstance(ids, list) for one in ids if type(one) is int and one >= 0]
    return range(min(ids), max(ids) + 1) if ids else range(0)


def _modules(config: ModelConfig) -> list[str]:
    """Those whose rows are tokens."""
    names = config.family.wiring.names
    return [names.embed, *([] if config.tie_embeddings else [names.head])]
