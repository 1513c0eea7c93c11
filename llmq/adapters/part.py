"""A part of the model trained alone, by the names of its parameters: the upper layers, a module, or the biases (BitFit;
Ben Zaken et al., "BitFit: Simple Parameter-efficient Fine-tuning for Transformer-based Masked Language-models", 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from llmq.adapters.method import NoAdapters
from llmq.adapters.targets import rows_named
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
        """The part of which these are names or patterns of Hugging Face's parameters or modules, whole or their last
        parts. UsageError."""

        def is_named(by: str, name: str) -> bool:
            return any(fnmatchcase(name, form) for form in (by, f"*.{by}", f"{by}.*", f"*.{by}.*"))

        kept = rows_named("--train-only", names, lambda row: [part.name for part in row.parts], is_named, config)
        return cls(names, frozenset(row.name for row in parameter_rows(config)) - kept)

    def rows(self, rows: Sequence[Row], config: ModelConfig) -> tuple[Row, ...]:
        """The rows of the model, of which some are frozen."""
        return tuple(replace(row, trainable=row.trainable and row.name not in self.frozen) for row in rows)

    def is_frozen(self, row: str) -> bool:
        """Whether it is among those."""
        return row in self.frozen

    def must_match(self) -> dict[str, Any]:
        """What is trained, unless all is."""
        return {"trained": self.names} if self.frozen else {}
