"""Adapters merged into the model that they change: W + sum of weight s B A, in f32, a parameter at a time."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from llmq.adapters.added_tokens import DELTA, TABLES, grown_for
from llmq.adapters.method import NO_ADAPTERS, Method
from llmq.adapters.resolve import MERGED, StoredAdapter, held_for, merged_record, open_adapter
from llmq.adapters.targets import EMBED_ROW, FILE, LM_HEAD
from llmq.errors import DataError
from llmq.files import tensor_files
from llmq.files.carried import carried_from
from llmq.files.huggingface import Export
from llmq.files.source import ModelSource, open_parameters
from llmq.model.config import ModelConfig
from llmq.model.held import HeldBase
from llmq.model.parameters import parameter_rows
from llmq.row import Row

Read = Callable[[Row], np.ndarray]


@dataclass(frozen=True)
class Addition:
    """An adapter whose tensors, by the `names` of PEFT less its prefix, are read in f32; `weight` times it is added."""

    adapters: Method
    names: Collection[str]
    read: Callable[[str], np.ndarray]
    weight: float = 1.0


@dataclass(frozen=True)
class Merged:
    """What was written: where, how many maps have changed, whether the head is the embedding's no more, how the base
    was held, and what the user should know."""

    folder: Path
    num_maps: int
    unties: bool
    held: HeldBase
    notes: tuple[str, ...]


def merge(
    source: ModelSource,
    adapters: Mapping[Path, float],
    out_dir: Path,
    *,
    dtype: str | None,
    overwrite: bool,
    base_dtype: str | None = None,
    model_dtype: str | None = None,
    base_only: bool = False,
) -> Merged:
    """Writes the model with `adapters`, each times its weight, as a Hugging Face folder; `base_only`: the base of the
    adapters as their run held it, without them. DataError, StorageError.

    What they are added to is the base as it was held when they were trained, or in `base_dtype` by a run in
    `model_dtype`. A tied head that has an adapter becomes a matrix of its own. Biases and modules trained in full
    replace the model's, in the measure of their adapter's weight.
    """
    for folder in adapters:
        source = grown_for(source, folder)
    opened = [open_adapter(folder, source.config) for folder in adapters]
    notes = [text for one in opened if (text := one.check_base(source, 0)) is not None]
    held = held_for([one.trained_on for one in opened], base_dtype, model_dtype)
    values = open_parameters(source, 0)
    for one in (one for one in opened if held.is_quantized and one.adapters.takes_out):
        if len(opened) > 1:
            raise DataError(
                f"{one.folder} takes what it began with out of the weights before they are held in {held.base}, and "
                "other adapters do not: merge it alone"
            )
        values = one.adapters.rest(source.config, values)
    changes = [] if base_only else _changes(opened, list(adapters.values()), held)
    names = {target.module.name for change in changes for target in change.adapters.targets}
    config = untied(source.config, [change.adapters for change in changes])
    rows, in_source = parameter_rows(config), {row.name: row for row in parameter_rows(source.config)}

    def read(row: Row) -> np.ndarray:
        ((own, value),) = values([in_source[EMBED_ROW if row.name not in in_source else row.name]])
        return _changed(row, held.value(own, value).astype(np.float32), changes)

    beside = {} if base_only else {MERGED: merged_record(source, list(adapters))}
    about = (dtype or config.dtype, source.tokenizer_folder, overwrite)
    export = Export(out_dir, config, rows, *about, beside=beside, carried=carried_from(source.folder, rows))
    return Merged(export.write(read), len(names), config != source.config, held, tuple(notes))


def _changes(opened: Sequence[StoredAdapter], weights: Sequence[float], held: HeldBase) -> list[Addition]:
    """What adapters change. DataError for those that are a part of no weight."""
    found = []
    for one, weight in zip(opened, weights, strict=True):
        if one.adapters.unmergeable:
            raise DataError(
                f"{one.folder} has {one.adapters.unmergeable} and cannot be merged: give it to llmq-generate with "
                "--adapter, or to PEFT"
            )
        own = one.adapters.on_rest() if held.is_quantized else one.adapters
        found.append(Addition(own, one.tensors, one.read, weight))
    return found


def untied(config: ModelConfig, adapters: Sequence[Method]) -> ModelConfig:
    """The config of a model with these adapters merged into it: a head that has one is no longer the embedding."""
    has_head = any(target.module.name == LM_HEAD for one in adapters for target in one.targets)
    return replace(config, tie_embeddings=False) if has_head and config.tie_embeddings else config


def _changed(row: Row, value: np.ndarray, changes: Sequence[Addition]) -> np.ndarray:
    """The value of a row with everything that adapters add to its parts."""
    base = value.copy()  # what a method adds may depend on it
    for one, weight in ((one, np.float32(one.weight)) for one in changes):
        targets = one.adapters.changed_tensors()
        for part in row.parts:
            own = replace(part, transposed=False)  # in the order of adapters' tensors, whatever the model's are
            here, pure = own.take(value), own.take(base)
            if part.name in one.names:
                read = one.read(part.name)
                here += weight * ((read.T if part.transposed else read) - pure)
            if target := targets.get(part.name):
                change = one.adapters.change(target, pure, one.read)
                pieces = tensor_files.chunks(here.shape) if here.ndim > 1 else [(0, len(here))]
                for start, stop in pieces:
                    here[start:stop] += weight * change(start, stop)
            if (new := one.adapters.new_rows) and row.name in TABLES:
                at = slice(new.start, new.stop)
                here[at] += weight * (one.read(f"{part.name.removesuffix('.weight')}.{DELTA}") - pure[at])
            own.put(value, here)
    return value


@dataclass(frozen=True)
class MergedExport(Export):
    """The export of a run's model with its `adapters` merged into what the run trained on: `held` are the run's rows,
    of which quantized ones are read dequantized."""

    adapters: Method = NO_ADAPTERS
    held: Sequence[Row] = ()

    @cached_property
    def _of_site(self) -> dict[str, list[Row]]:
        """The rows of adapters by the name of their site."""
        found: dict[str, list[Row]] = {}
        for row in self.held:
            if row.file == FILE:
                found.setdefault(re.split(r"\.(?:lora_|ia3|added)", row.name)[0], []).append(row)
        return found

    @cached_property
    def _by_name(self) -> dict[str, Row]:
        return {row.name: row for row in self.held}

    def write(self, read: Read) -> Path:
        """As that of any export."""
        return super().write(partial(self._merged, read))

    def read_along(self, read: Read) -> Path:
        """Reads what `write` does, and merges nothing."""
        for row in self.rows:
            self._read(read, row)
        return self.folder

    def _read(self, read: Read, row: Row) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The value of a row of the model in f32, and the tensors of the adapters on it by name."""
        held = self._by_name.get(row.name) or self._by_name[EMBED_ROW]  # a head that was tied
        value = read(held).astype(np.float32)
        tensors: dict[str, np.ndarray] = {}
        for each in self._of_site.get(row.site or row.name.removesuffix(".weight"), ()):
            whole = read(each).reshape(each.part_axes)
            tensors |= {part.name: part.take(whole).astype(np.float32) for part in each.parts}
        return value, tensors

    def _merged(self, read: Read, row: Row) -> np.ndarray:
        value, tensors = self._read(read, row)
        change = Addition(self.adapters.on_rest(), (), tensors.__getitem__)  # `held` lacks what was taken out
        return _changed(row, value, [change])
