"""What a run made, as `llmq.train` returns it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from llmq.plan.plan import Plan


@dataclass(frozen=True)
class TrainResult:
    """What a run made. Losses are nats per trained token; paths are None for what was not written.

    A dry run gives its `plan` alone: `total_bytes`, and `table()` with the bytes of each part.
    The exit code is that of NonFiniteError where the model was not exported because it is ruined; `warnings` say why,
    and what else may have spoiled the run.
    """

    exit_code: int = 0
    steps: int = 0
    train_loss: float = math.nan  # of the last step
    eval_loss: float = math.nan  # of the last evaluation
    tokens_per_second: float = math.nan  # median over the steps of this run
    sol: float | None = None  # median share of the device's speed of light
    first_step_s: float = math.nan  # from the call to the end of the first step
    model_path: Path | None = None
    merged_path: Path | None = None  # of --merge
    log_path: Path | None = None
    checkpoint_path: Path | None = None
    warnings: tuple[str, ...] = ()
    plan: Plan | None = None
