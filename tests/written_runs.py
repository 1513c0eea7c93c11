"""Logs of runs, as training writes them."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmq.options.run import LogOptions
from llmq.training.log import RunLog
from llmq.training.records import EvalRecord, TrainRecord


def write_run(
    folder: Path,
    losses: Sequence[float],
    evals: Mapping[int, float],
    *,
    name: str | None = None,
    seconds: float = 100.0,
    whole: int = 0,
    samples: Sequence[dict[str, Any]] = (),
) -> Path:
    """A finished run with these training losses from step 1 on, and evaluation losses by step; of `whole` on more
    tokens. `samples` are of step 3."""
    options = LogOptions.model_validate({"name": name or folder.name, "log_file": str(folder / "log.jsonl")})
    with RunLog(options, io.StringIO()) as log:
        log.options({"name": options.name, "learning_rate": 1e-5})
        log.section("model", {"path": "tinyllama", "num_parameters": 7})
        log.begin()
        for step, loss in enumerate(losses, 1):
            epoch, applied = step / len(losses), math.isfinite(loss)
            log.train(TrainRecord(step, epoch, loss, 1.0 + step, 1e-4, seconds, 512, 512, applied=applied))
            if step in evals:
                log.evaluation(EvalRecord(step, epoch, evals[step], loss, 50.0, 512, 999 if step == whole else 512))
        if samples:
            log.record("samples", step=3, samples=samples)
        log.end("finished", eval_loss=0.5)
    return folder
