"""What is summed over tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class TokenSums(NamedTuple):
    """Over some tokens: the sum of losses, the number of trained tokens, and the hits among them, whose target has the
    largest logit; None with a loss that does not count hits."""

    loss: float
    tokens: int
    hits: int | None

    @classmethod
    def of(cls, found: Mapping[str, float]) -> TokenSums:
        """Those of sums by name."""
        return cls(found["loss"], int(found["tokens"]), int(found["hits"]) if "hits" in found else None)

    @property
    def mean_loss(self) -> float:
        """Per trained token; 0 without any."""
        return self.loss / max(self.tokens, 1)

    @property
    def accuracy(self) -> float | None:
        """Share of hits among trained tokens; 0 without any."""
        return None if self.hits is None else self.hits / max(self.tokens, 1)
