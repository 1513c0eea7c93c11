"""The options on adapters made into their targets, and into the values that a run begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmq.files.adapters import Values, open_adapter
from llmq.model.adapters import Adapters, chosen, targets
from llmq.model.config import ModelConfig
from llmq.model.parameters import left_out, num_parameters
from llmq.row import Row

if TYPE_CHECKING:
    from llmq.options.adapters import AdapterOptions


def resolve(options: AdapterOptions, config: ModelConfig) -> Adapters | None:
    """The adapters that the options ask for on a model; None for a run that trains the model. UsageError, DataError."""
    if options.adapter is not None:
        found = replace(open_adapter(Path(options.adapter), config).adapters, base=options.base_dtype)
        return found if options.lora_dropout is None else replace(found, dropout=options.lora_dropout)
    if options.lora_rank is None:
        return None
    assert options.lora_alpha is not None and options.lora_targets is not None
    modules, rank, alpha = chosen(options.lora_targets, config), options.lora_rank, options.lora_alpha
    return Adapters(
        rank,
        alpha,
        targets(modules, rank, alpha, rslora=options.rslora),
        dropout=options.lora_dropout or 0.0,
        bias=options.lora_bias or "none",
        rslora=options.rslora,
        init=options.lora_init or "kaiming",
        base=options.base_dtype,
    )


def frozen(options: AdapterOptions, config: ModelConfig) -> frozenset[str]:
    """The names of the model's rows that --train-only leaves frozen. UsageError."""
    return frozenset() if options.train_only is None else left_out(options.train_only, config)


def first_values(options: AdapterOptions, config: ModelConfig, model: Values) -> Values:
    """The values of all rows before the first step: the model's, and those of --adapter. DataError."""
    return model if options.adapter is None else open_adapter(Path(options.adapter), config).values(model)


def note(adapters: Adapters | None, rows: Sequence[Row]) -> str:
    """One line on what is trained: `adapters of rank 16 on 196 linear maps: 40,370,176 of 7,656,... parameters`."""
    trained, every = (num_parameters(kept) for kept in ([row for row in rows if row.trainable], rows))
    counts = f"{trained:,} of {every:,} parameters are trained ({trained / every:.2%}), the others frozen"
    if adapters is None:
        return f"A part of the model: {counts}"
    ranks = sorted({target.rank for target in adapters.targets})
    said = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    biases = "" if adapters.bias == "none" else " with biases"
    return f"Adapters of {said} on {len(adapters.targets)} linear maps{biases}: {counts}"
