"""The options on adapters made into a method of adaptation, into the values that it begins with, and into what the user
should know of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from llmq.adapters.lora import Lora
from llmq.adapters.method import NO_ADAPTERS, Method
from llmq.adapters.methods import METHODS
from llmq.adapters.peft import open_adapter
from llmq.adapters.several import Several, member_of
from llmq.files.source import ModelSource, Values, drawn
from llmq.model.config import ModelConfig
from llmq.model.held import HeldBase
from llmq.model.parameters import num_parameters
from llmq.options.adapters import AdapterOptions
from llmq.options.sweep import MemberOptions
from llmq.row import Row


def resolve(
    options: AdapterOptions, config: ModelConfig, steps: int = 0, members: Sequence[MemberOptions] = ()
) -> Method:
    """What the options ask for on a model, with the `members` of --adapters. UsageError, DataError.

    `steps` are those of the run, which the schedule of AdaLoRA ends with; 0 where they are not known.
    """
    if members:
        each = [member_of(one, resolve(one.options.adapters, config)) for one in members]
        return Several(tuple(each), base=options.base_dtype)
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


def first_values(
    options: AdapterOptions,
    adapters: Method,
    source: ModelSource,
    model: Values,
    seed: int,
    given: Mapping[str, np.ndarray],
    members: Sequence[MemberOptions] = (),
) -> Values:
    """The values of all rows before the first step: the model's, and those of --adapter, or of new adapters, of which
    some may be `given` by the names of their tensors; of several at once each has those of a run of it alone.
    DataError, UsageError."""
    if isinstance(adapters, Several):
        own = dict[str, Values]()
        for one, member in ((one, adapters.by_name[one.name]) for one in members):
            fresh = _drawn(source, member.seed)
            own[one.name] = first_values(one.options.adapters, member.adapters, source, fresh, member.seed, {})
        return _of_each(model, own)
    if options.adapter is not None:
        return open_adapter(Path(options.adapter), source.config).values(model)
    return adapters.first_values(options, source, model, seed, given)


def _drawn(source: ModelSource, seed: int) -> Values:
    """Rows as a source draws them."""
    return lambda rows: ((row, drawn(source, row, seed)) for row in rows)


def _of_each(model: Values, own: Mapping[str, Values]) -> Values:
    """The rows of the model, and of each of several adapters by name."""

    def values(rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
        yield from model([row for row in rows if row.adapter is None])
        for name, found in own.items():
            yield from found([row for row in rows if row.adapter == name])

    return values


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
