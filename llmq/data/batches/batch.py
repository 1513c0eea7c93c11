"""What one rank computes on in one micro-step: one object from the loader to the engine's slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmq.tensor import IGNORED


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch, and where it stands in the run's sequence of samples.

    `tokens`, `targets` (B,T) int32; a target of -100 is not trained. `borders` (B,D+1) int32 of a packed row are the
    first tokens of its documents, then T repeated. `places` (B,) int64 is where each row stands in the run's sequence;
    None in evaluation. `position` counts the samples taken by all ranks up to and with this batch, `epoch` the passes
    over the data; `stream` is what a stream needs to resume after it.
    """

    tokens: np.ndarray
    targets: np.ndarray
    borders: np.ndarray | None = None
    places: np.ndarray | None = None
    position: int = 0
    epoch: float = 0.0
    stream: dict[str, int] | None = None
    wait_ms: float = 0.0  # how long the training thread waited for it

    @property
    def num_real(self) -> int:
        """Tokens without the padding, which is the 0s that are not trained at the end of a row."""
        used = (self.tokens != 0) | (self.targets != IGNORED)
        ends = self.tokens.shape[1] - np.argmax(used[:, ::-1], axis=1)
        return int(np.where(used.any(axis=1), ends, 0).sum())
