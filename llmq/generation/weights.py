"""The weights of a model that is read or writes: where they come from, an adapter on them, and how they are held."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmq.adapters.added_tokens import grown_for
from llmq.adapters.method import NO_ADAPTERS, Method
from llmq.adapters.resolve import StoredAdapter, as_held, held_for, open_adapter
from llmq.files.source import ModelSource, Values, find_source, open_parameters
from llmq.model.config import ModelConfig
from llmq.model.held import HeldBase


@dataclass(frozen=True)
class ModelWeights:
    """A model's weights, with those of an adapter; `notes` are what the user should know of them."""

    source: ModelSource
    adapter: StoredAdapter | None
    held: HeldBase
    seed: int
    notes: tuple[str, ...]

    @classmethod
    def find(
        cls,
        model: str,
        *,
        adapter: str | None = None,
        base_dtype: str | None = None,
        revision: str | None = None,
        from_scratch: bool = False,
        seed: int = 0,
    ) -> ModelWeights:
        """What a folder or name stands for, without reading it yet. UsageError, DataError."""
        found: list[str] = []
        source = find_source(model, revision=revision, from_scratch=from_scratch, say=found.append)
        source = grown_for(source, adapter)
        stored = None if adapter is None else open_adapter(Path(adapter), source.config)
        held = held_for([stored.trained_on if stored else None], base_dtype, None)
        other = stored.check_base(source, seed) if stored else None
        said = f"The weights of the layers are held in {held}" if held.is_quantized else None
        return cls(source, stored, held, seed, (*found, *(text for text in (other, said) if text)))

    @property
    def config(self) -> ModelConfig:
        """The shape of the model."""
        return self.source.config

    @property
    def adapters(self) -> Method:
        """What is beside the model's weights, without dropout."""
        return NO_ADAPTERS if self.adapter is None else self.adapter.adapters.without_dropout()

    def values(self) -> Values:
        """The values of rows, those of the adapter among them."""
        model = open_parameters(self.source, self.seed)
        return as_held(self.held, model) if self.adapter is None else self.adapter.values(model, self.held)
