"""Adapters merged into the model that they change: W + sum of weight s B A, in f32, a parameter at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llmq.errors import DataError
from llmq.files import weight_files
from llmq.files.adapters import StoredAdapter, open_adapter
from llmq.files.huggingface import Export
from llmq.files.source import ModelSource, open_parameters
from llmq.model.adapters import EMBED_ROW, LM_HEAD
from llmq.model.held import as_held
from llmq.model.parameters import parameter_rows
from llmq.row import Row


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
    tied head that has an adapter becomes a matrix of its own. Biases and modules trained in full replace the model's,
    in the measure of their adapter's weight.
    """
    opened = [Weighted(open_adapter(folder, source.config), weight) for folder, weight in adapters.items()]
    if led := [one.adapter.folder for one in opened if one.adapter.adapters.num_virtual]:
        raise DataError(
            f"{led[0]} has virtual tokens, which are a part of no weight and cannot be merged: give it to "
            "llmq-generate with --adapter, or to PEFT"
        )
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
    replaced = any(part.name in one.adapter.tensors for one in adapters for part in row.parts)
    base = value.copy() if replaced or any(one.adapter.adapters.is_relative for one in adapters) else value
    for adapter, weight in ((one.adapter, np.float32(one.weight)) for one in adapters):
        targets = {f"{target.module.name}.weight": target for target in adapter.adapters.targets}
        if adapter.adapters.method == "ia3":  # gains multiply the bias, too
            targets |= {f"{t.module.name}.bias": t for t in adapter.adapters.targets if not t.inward}
        for part in row.parts:
            here = value[part.start : part.stop]
            if part.name in adapter.tensors:
                here += weight * (adapter.read(part.name) - base[part.start : part.stop])
            if target := targets.get(part.name):
                pure = base[part.start : part.stop]
                change = adapter.change(target, pure)
                pieces = weight_files.chunks(here.shape) if here.ndim > 1 else [(0, len(here))]
                for start, stop in pieces:
                    here[start:stop] += weight * change(start, stop)
    return value
