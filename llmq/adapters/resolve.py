"""The options on adapters made into a method of adaptation, into the values that it begins with, and into what the user
should know of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from llmq.adapters.lora import Lora
from llmq.adapters.method import NO_ADAPTERS, Method
from llmq.adapters.methods import METHODS
from llmq.adapters.peft import open_adapter
from llmq.files.source import ModelSource, Values
from llmq.model.config import ModelConfig
from llmq.model.held import HeldBase
from llmq.model.parameters import num_parameters
from llmq.options.adapters import AdapterOptions
from llmq.row import Row


def resolve(options: AdapterOptions, config: ModelConfig, steps: int = 0) -> Method:
    """What the options ask for on a model. UsageError, DataError.

    `steps` are those of the run, which the schedule of AdaLoRA ends with; 0 where they are not known.
    """
    if options.adapter is not None:
        return _stored(options, Path(options.adapter), config)
    asked = (method.of_options(options, config, steps) for method in METHODS)
    return next((found for found in asked if found is not None), NO_ADAPTERS)


def _stored(options: AdapterOptions, folder: Path, config: ModelConfig) -> Method:
    """The adapter of a folder, on a base that is held as it was unless the options say otherwise."""
    stored = open_adapter(folder, config)
    found, trained_on = stored.adapters, stored.trained_on
    found = replace(found, base=options.base_dtype or (trained_on.held.base if trained_on else None))
    if not isinstance(found, Lora):
        return found
    dropout = found.dropout if options.lora_dropout is None else options.lora_dropout
    return replace(found, dropout=dropout, plus=options.lora_plus_ratio or 1.0)


def merges(options: AdapterOptions) -> bool:
    """Whether the finished run leaves the merged model, too."""
    return options.merge


def first_values(options: AdapterOptions, adapters: Method, source: ModelSource, model: Values, seed: int) -> Values:
    """The values of all rows before the first step: the model's, and those of --adapter, or of new adapters. DataError,
    UsageError."""
    if options.adapter is not None:
        return open_adapter(Path(options.adapter), source.config).values(model)
    return adapters.first_values(options, source, model, seed)


def base_notes(options: AdapterOptions, source: ModelSource, held: HeldBase, seed: int) -> Iterator[str]:
    """What the user should know of the base of --adapter, which this run holds so. DataError for a model that has the
    adapter in its weights."""
    if options.adapter is None:
        return
    stored = open_adapter(Path(options.adapter), source.config)
    if other := stored.check_base(source, seed):
        yield other
    if (trained_on := stored.trained_on) is None:
        return
    if trained_on.held != held:
        yield f"{options.adapter} was trained on a base in {trained_on.held}, and this run holds it in {held}"
    elif held.is_quantized and options.base_dtype is None:
        yield f"The base is held in {held}, as {options.adapter} was trained on it (--base-dtype {held.base})"


def note(adapters: Method, rows: Sequence[Row]) -> str:
    """One line on what is trained: `Adapters of rank 16 on 196 linear maps: 40,370,176 of 7,656,... parameters`."""
    trained, every = (num_parameters(kept) for kept in ([row for row in rows if row.trainable], rows))
    counts = f"{trained:,} of {every:,} parameters are trained ({trained / every:.2%}), the others frozen"
    return f"{adapters.words()}: {counts}"
