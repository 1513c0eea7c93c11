"""A part of the model trained alone, by the names of its parameters: the upper layers, a module, or the biases (BitFit;
Ben Zaken et al., "BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked Language-models", 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from llmq.adapters.method import NoAdapters
from llmq.errors import UsageError
from llmq.model.config import ModelConfig
from llmq.model.parameters import parameter_rows
from llmq.options.adapters import AdapterOptions
from llmq.row import Row


@dataclass(frozen=True)
class PartOfModel(NoAdapters):
    """The run that trains what `names` say, and no rows named in `frozen`."""

    names: str
    frozen: frozenset[str]

    @classmethod
    def of_options(cls, options: AdapterOptions, config: ModelConfig, steps: int) -> PartOfModel | None:
        """What --train-only names. UsageError."""
        return None if options.train_only is None else cls.named(options.train_only, config)

    @classmethod
    def named(cls, names: str, config: ModelConfig) -> PartOfModel:
        """The part with these names or patterns. UsageError."""
        return cls(names, left_out(names, config))

    def rows(self, rows: Sequence[Row], config: ModelConfig) -> tuple[Row, ...]:
        """The rows of the model, of which some are frozen."""
        return tuple(replace(row, trainable=row.trainable and row.name not in self.frozen) for row in rows)

    def is_frozen(self, row: str) -> bool:
        """Whether it is among those."""
        return row in self.frozen

    def must_match(self) -> dict[str, Any]:
        """What is trained, unless all is."""
        return {"trained": self.names} if self.frozen else {}


def left_out(text: str, config: ModelConfig) -> frozenset[str]:
    """The names of all rows but those of which Hugging Face's names match `text`: names or patterns, with commas.

    A name is a parameter's or a module's, whole or its last parts. UsageError for one that matches nothing, and where
    only a part of a row would be trained.
    """
    rows, wanted = parameter_rows(config), [part.strip() for part in text.split(",")]

    def is_named(name: str, by: str) -> bool:
        forms = (by, f"*.{by}", f"{by}.*", f"*.{by}.*")
        return any(fnmatchcase(name, form) for form in forms)

    hits = {part.name: [by for by in wanted if is_named(part.name, by)] for row in rows for part in row.parts}
    if unknown := [by or "''" for by in wanted if not any(by in found for found in hits.values())]:
        example = ", ".join(part.name for row in rows[1:4] for part in row.parts)
        raise UsageError(
            f"--train-only {', '.join(unknown)}: no parameter of the model has such a name; some are {example}"
        )
    kept = {row.name: [bool(hits[part.name]) for part in row.parts] for row in rows}
    if cut := [row for row in rows if any(kept[row.name]) and not all(kept[row.name])]:
        names = ", ".join(part.name for part in cut[0].parts)
        raise UsageError(
            f"--train-only {text} names a part of {names}, which llmq holds as one: name all of them, or none"
        )
    return frozenset(name for name, found in kept.items() if not any(found))
