"""LISA: all layers but a few, drawn anew every so many steps, stay as they are (Pan et al., "LISA: Layerwise Importance
Sampling for Memory-Efficient Large Language Model Fine-Tuning", 2024).

Embedding, head and final norm always train. As in the paper's algorithm each period is a run of AdamW of its own:
moments begin at zero with it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from llmq.model.config import ModelConfig
from llmq.model.parameters import parameter_rows


@dataclass(frozen=True)
class Lisa:
    """So many `layers` train at a time, for `interval` optimizer steps; which ones follows from the `seed`."""

    layers: int
    interval: int
    seed: int

    def begins(self, step: int) -> bool:
        """Whether other layers train from the optimizer step on, counted from 1."""
        return (step - 1) % self.interval == 0

    def active(self, config: ModelConfig, step: int) -> tuple[int, ...]:
        """The layers that train in a step, all sets being as likely; 0 counts as the first step."""
        period = (max(step, 1) - 1) // self.interval
        key = hashlib.blake2b(f"lisa\0{self.seed}\0{period}".encode(), digest_size=16).digest()
        rng = np.random.Generator(np.random.Philox(key=np.frombuffer(key, np.uint64)))
        return tuple(sorted(int(one) for one in rng.permutation(config.num_layers)[: self.layers]))

    def frozen(self, config: ModelConfig, step: int) -> frozenset[str]:
        """The names of the rows that do not train in a step."""
        active = self.active(config, step)
        return frozenset(
            row.name for row in parameter_rows(config) if row.layer is not None and row.layer not in active
        )
