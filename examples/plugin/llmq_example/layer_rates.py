"""Learning rates that fall from layer to layer (Howard and Ruder, 2018): lower layers change less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmq.adapters.method import NoAdapters
from llmq.errors import UsageError
from llmq.model.config import ModelConfig
from llmq.options.adapters import AdapterOptions
from llmq.row import Row


@dataclass(frozen=True)
class LayerRates(NoAdapters):
    """The rate of the head is that of the run, that of each layer `decay` times the one above it."""

    decay: float

    @classmethod
    def of_options(cls, options: AdapterOptions, config: ModelConfig, steps: int, *, decay: float = 0.9) -> LayerRates:
        """With its own option. UsageError."""
        if not 0 < decay <= 1:
            raise UsageError(f"layer_rates:decay={decay} is not between 0 and 1")
        return cls(decay=decay)

    def rows(self, rows: Sequence[Row], config: ModelConfig) -> tuple[Row, ...]:
        """The rows of the model, each with its rate; embeddings are below all layers."""
        return tuple(replace(row, rate=self.decay ** self._below(row, config.num_layers)) for row in rows)

    def _below(self, row: Row, num_layers: int) -> int:
        if row.layer is not None:
            return num_layers - row.layer
        return num_layers + 1 if "embed" in row.name else 0

    def must_match(self) -> dict[str, Any]:
        """A run that resumes has the same rates."""
        return {"layer_rates": self.decay}

    def words(self) -> str:
        """What is trained."""
        return f"The model, with a rate {self.decay:g} times that of the layer above"
