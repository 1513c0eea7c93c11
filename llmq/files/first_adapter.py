"""The values that rows of a new adapter begin with, where these follow from the weights that it adapts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from llmq.files.adapters import MAGNITUDE, Values, norms_of
from llmq.model.config import ModelConfig
from llmq.model.parameters import parameter_rows
from llmq.row import Row


def with_norms(model: Values, config: ModelConfig) -> Values:
    """The values of rows: magnitudes are the norms of their map's weights, and others as in `model`.

    A weight that is among the rows is read once.
    """
    weights = {row.name: row for row in parameter_rows(config)}

    def found(rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
        norms: dict[str, list[Row]] = {}
        for row in rows:
            if row.init == "norms":
                norms.setdefault(row.name.partition(".lora_")[0] + ".weight", []).append(row)
        others = [row for row in rows if row.init != "norms"]
        named = {row.name for row in others}
        for row, value in model(others):
            yield row, value
            yield from _norms(row, value, norms.get(row.name, ()))
        for row, value in model([weights[name] for name in norms if name not in named]):
            yield from _norms(row, value, norms[row.name])

    return found


def _norms(weight: Row, value: np.ndarray, rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
    """The magnitudes of `rows`, whose maps are parts of a weight."""
    parts = {part.name: part for part in weight.parts}
    for row in rows:
        part = parts[row.parts[0].name.removesuffix(MAGNITUDE) + "weight"]
        yield row, norms_of(value[part.start : part.stop])
