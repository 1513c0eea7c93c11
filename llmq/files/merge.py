"""Adapters merged into the model that they change: W + sum of weight s B A, in f32, a parameter at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llmq.files import weight_files
from llmq.files.adapters import StoredAdapter, open_adapter
from llmq.files.huggingface import Export
from llmq.files.source import ModelSource, open_parameters
from llmq.model.adapters import LM_HEAD
from llmq.model.held import as_held
from llmq.model.parameters import parameter_rows
from llmq.row import Row

EMBED_ROW = "embed.weight"  # which a tied head is


@dataclass(frozen=True)
class Weighted:
    """An adapter, and how much of it is added."""

    adapter: StoredAdapter
    weight: float


@dataclass(frozen=True)
class Merged:
    """What was written: where, how many maps have changed, and whether the head is the embedding's no more."""

    folder: Path
    num_maps: int
    unties: bool


def merge(
    source: ModelSource,
    adapters: Mapping[Path, float],
    out_dir: Path,
    *,
    dtype: str | None,
    overwrite: bool,
    base: str | None = None,
) -> Merged:
    """Writes the model with `adapters`, each times its weight, as a Hugging Face folder. DataError, StorageError.

    With `base`, a --base-dtype, they are added to what that stands for, in bf16, in place of the layers' weights. A
    tied head that has an adapter becomes a matrix of its own. Trained biases replace the model's, in the measure of
    their adapter's weight.
    """
    opened = [Weighted(open_adapter(folder, source.config), weight) for folder, weight in adapters.items()]
    names = {target.module.name for one in opened for target in one.adapter.adapters.targets}
    unties = LM_HEAD in names and source.config.tie_embeddings
    config = replace(source.config, tie_embeddings=False) if unties else source.config
    rows, values = parameter_rows(config), open_parameters(source, 0)
    in_source = {row.name: row for row in parameter_rows(source.config)}

    def read(row: Row) -> np.ndarray:
        ((_, value),) = values([in_source[EMBED_ROW if row.name not in in_source else row.name]])
        return _changed(row, as_held(row, value, base).astype(np.float32), opened)

    export = Export(out_dir, config, rows, dtype or config.dtype, source.tokenizer_folder, overwrite)
    return Merged(export.write(read), len(names), unties)


def _changed(row: Row, value: np.ndarray, adapters: Sequence[Weighted]) -> np.ndarray:
    """The value of a row with everything that adapters add to its parts."""
    base = value.copy() if row.name.endswith(".bias") else value
    for adapter, weight in ((one.adapter, np.float32(one.weight)) for one in adapters):
        targets = {f"{target.module.name}.weight": target for target in adapter.adapters.targets}
        for part in row.parts:
            here = value[part.start : part.stop]
            if part.name in adapter.tensors:
                here += weight * (adapter.read(part.name) - base[part.start : part.stop])
            if target := targets.get(part.name):
                for start, stop in weight_files.chunks(here.shape):
                    here[start:stop] += weight * adapter.change(target, start, stop)
    return value
