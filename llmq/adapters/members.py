"""Several adapters that are trained at once: their options made into what is planned, and into first values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from llmq.adapters import resolve as adapters
from llmq.adapters.lora import Lora
from llmq.adapters.method import Method
from llmq.adapters.several import Member, Several
from llmq.errors import UsageError
from llmq.files.source import ModelSource, Values, drawn
from llmq.model import optimizer
from llmq.model.config import ModelConfig
from llmq.options.sweep import MemberOptions
from llmq.row import Row


def resolve(members: Sequence[MemberOptions], base: str | None, config: ModelConfig) -> Several | None:
    """The adapters of `--adapters` on a base held in a dtype; None of a run without. UsageError for what cannot share
    the base with others, DataError for a folder of `adapter` that does not fit."""
    return Several(tuple(_member(one, config) for one in members), base=base) if members else None


def _member(one: MemberOptions, config: ModelConfig) -> Member:
    found, flat = adapters.resolve(one.options.adapters, config), one.options.to_flat()
    why = _not_shared(found)
    if why is not None or not isinstance(found, Lora):
        raise UsageError(
            f"{one.name}: the adapter in {flat['adapter']} has {why}, which does not go with --adapters: train it alone"
        )
    hyper = optimizer.resolve(one.options.optimizer)
    return Member(one.name, replace(found, base=None), flat["batch_size"], flat["seed"], hyper)


def _not_shared(found: Method) -> str | None:
    """What an adapter has that others would see, or that llmq has of one adapter alone."""
    if type(found) is not Lora:
        return "another method than LoRA"
    if found.takes_out:
        return f"a base that {found.init} took it out of"
    if found.also or found.bias != "none":
        return "parameters of the model"
    return "magnitudes" if found.dora else None


def first_values(members: Sequence[MemberOptions], several: Several, source: ModelSource, model: Values) -> Values:
    """A function that gives rows before the first step: the model's, and of each adapter those of a run of it alone."""
    own = {one.name: _own_values(one, several, source) for one in members}

    def values(rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
        yield from model([row for row in rows if row.adapter is None])
        for name, found in own.items():
            yield from found([row for row in rows if row.adapter == name])

    return values


def _own_values(one: MemberOptions, several: Several, source: ModelSource) -> Values:
    """The first values of an adapter's rows: drawn, or those of the folder that it continues."""
    member = several.by_name[one.name]

    def fresh(rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
        return ((row, drawn(source, row, member.seed)) for row in rows)

    return adapters.first_values(one.options.adapters, member.adapters, source, fresh, member.seed, {})
