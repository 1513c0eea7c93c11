"""Held-out loss: the evaluation program over batches of held-out windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llmq.data.batches.loader import eval_batches
from llmq.data.batches.windows import Samples
from llmq.engine.engine import Engine
from llmq.screen import StartTask, counted


class Evaluated(NamedTuple):
    """The sum of losses of the trained tokens, their number, and that of all tokens."""

    loss: float
    trained: int
    tokens: int


def held_out(
    engine: Engine, windows: Samples, steps: int | None, start_task: StartTask, stopped: Callable[[], bool]
) -> Evaluated | None:
    """The sums over the first `steps` batches (None: all), or None once `stopped`."""
    spec, total, trained, tokens = engine.plan.spec, 0.0, 0, 0
    whole = -(-windows.num_windows // spec.batch_size)
    batches = eval_batches(windows, spec.batch_size, spec.seq_len, steps)
    with start_task("Evaluating") as report:
        for batch in counted(batches, min(steps or whole, whole), report):
            if stopped():
                return None
            loss, num_trained = engine.evaluate(batch)
            total, trained, tokens = total + loss, trained + num_trained, tokens + batch.tokens.size
    return Evaluated(total, trained, tokens)
