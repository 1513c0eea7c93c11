"""How large a step is, by the data options alone: planning asks without reading any data."""

from __future__ import annotations

from typing import Protocol

from llmq.errors import UsageError


class StepOptions(Protocol):
    """Of the data options, those that sizes follow from."""

    @property
    def batch_size(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def grad_accumulation(self) -> int: ...
    @property
    def global_batch_size(self) -> int | None: ...


def step_of(options: StepOptions, world: int) -> tuple[int, int, int]:
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
