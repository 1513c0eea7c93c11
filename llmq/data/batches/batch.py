"""What one rank computes on in one micro-step, from the loader to the engine's slots; and how many make a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from llmq.errors import UsageError
from llmq.tensor import IGNORED

if TYPE_CHECKING:
    from llmq.options.data import DataOptions


@dataclass(frozen=True, eq=False)
class Batch:
    """A micro-batch, and its place in the run's sequence of samples.

    `tokens`, `targets` (B,T) int32; a target of -100 is not trained. `borders` (B,D+1) int32 of a packed row are the
    first tokens of its documents, then T repeated. `places` (B,) int64 are the rows' places in the run's sequence;
    None in evaluation. `position` counts the samples taken by all ranks up to and with this batch, `epoch` the passes
    over the data; `stream` is what a stream needs to resume after it. Each document begins with `num_virtual` positions
    of virtual tokens, which are 0 here and have no target.
    """

    tokens: np.ndarray
    targets: np.ndarray
    borders: np.ndarray | None = None
    places: np.ndarray | None = None
    position: int = 0
    epoch: float = 0.0
    stream: dict[str, Any] | None = None
    wait_ms: float = 0.0  # how long the training thread waited for it
    num_virtual: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens and padding, without virtual tokens."""
        return self.tokens.size - int(self._virtual_of_rows.sum())

    @property
    def num_real(self) -> int:
        """Tokens without virtual ones, and without the padding, which is the 0s that are not trained at the end of a
        row."""
        used = (self.tokens != 0) | (self.targets != IGNORED)
        ends = self.tokens.shape[1] - np.argmax(used[:, ::-1], axis=1) - self._virtual_of_rows
        return int(np.where(used.any(axis=1), ends, 0).sum())

    @property
    def _virtual_of_rows(self) -> np.ndarray:
        """Virtual tokens of each row (B,)."""
        count, length = self.tokens.shape
        documents = np.ones(count, int) if self.borders is None else (self.borders < length).sum(axis=1)
        return self.num_virtual * documents


def step_of(options: DataOptions, world: int) -> tuple[int, int, int]:
    """Sequences of a micro-batch, tokens of each, and micro-batches of a step on each of the ranks.

    UsageError where the global batch has no whole number of them.
    """
    if options.global_batch_size is None:
        return options.batch_size, options.seq_len, options.grad_accumulation
    per_micro_step = options.batch_size * world
    accumulation, rest = divmod(options.global_batch_size, per_micro_step)
    if rest or not accumulation:
        on_ranks = f" on {world} ranks" if world > 1 else ""
        lower = max(accumulation, 1) * per_micro_step
        raise UsageError(
            f"global_batch_size {options.global_batch_size} is not a multiple of {per_micro_step}, which is "
            f"batch_size {options.batch_size}{on_ranks}: use {lower} or {lower + per_micro_step}"
        )
    return options.batch_size, options.seq_len, accumulation
