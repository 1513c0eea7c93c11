"""A finished log to Weights & Biases: the options as its config, every train, eval and gpu record, what callbacks
logged, and all samples, at their steps.

The run's id comes from the log's header, so exporting the same log again finds the same run, and only the steps that
W&B does not have yet are sent (W&B's history cannot be rewritten: steps of an abandoned line stay there).
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from llmq.errors import DataError, StorageError, UsageError
from llmq.report.read import Log, read_log
from llmq.training.records import answer_of, asked_of

OURS = ("step", "time")  # columns that W&B keeps in its own way
SAMPLES = ["prompt", "completion", "end"]  # columns of the table of a step's completions


@dataclass(frozen=True)
class Exported:
    """Where the run is: `url` online, else None; `folder` is W&B's local copy, which `wandb sync` uploads."""

    run_id: str
    url: str | None
    folder: Path
    num_steps: int  # sent by this export


def export_wandb(
    log_file: Path,
    *,
    project: str = "llmq",
    name: str | None = None,
    entity: str | None = None,
    run_id: str | None = None,
    offline: bool = False,
) -> Exported:
    """Sends the log (a file, or the run folder) to W&B, or with `offline` or WANDB_MODE=offline to a folder for later.

    DataError for a log that cannot be read, UsageError without wandb, without a login, or when W&B refuses,
    StorageError when its local folder cannot be written.
    """
    log = read_log(log_file)
    history = _history(log)
    if not history:
        raise DataError(f"the log {log.path} has no steps yet")
    run_id = run_id or default_run_id(log)
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run_id):
        raise UsageError(f"--run-id {run_id!r} is not an id for W&B: use up to 64 letters, digits, '-' and '_'")
    if not re.fullmatch(r"[^/\\#?%:]{1,128}", project):
        raise UsageError(
            f"--project {project!r} is not a name for W&B: use up to 128 characters without / \\ # ? % : (a user or "
            "team goes to --entity)"
        )
    mode: Any = "offline" if offline else os.environ.get("WANDB_MODE") or "online"
    if mode not in ("online", "offline"):
        raise UsageError(f"WANDB_MODE={mode} would export nothing: unset it, or set it to online or offline")
    try:
        import wandb
    except ImportError as error:
        raise UsageError(
            f"the export needs wandb, which is not installed here ({error}): install llmq with its extra [wandb], or "
            '`pip install "wandb>=0.19"`'
        ) from error
    # Only what is in the log: not this machine's load, console or git state.
    settings = wandb.Settings(
        console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True, save_code=False
    )
    try:
        run = wandb.init(
            project=project,
            name=name or log.name,
            entity=entity,
            id=run_id,
            config=_config(log),
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=settings,
        )
        new = {step: values for step, values in history.items() if step >= run.step}
        samples = _samples(log)
        for step, values in new.items():
            shown = {"samples": wandb.Table(columns=SAMPLES, data=samples[step])} if step in samples else {}
            run.log({**values, **shown}, step=step)
        run.summary.update(_summary(log))
        exported = Exported(run_id, run.url if mode == "online" else None, Path(run.dir).parent, len(new))
        run.finish()
    except wandb.Error as error:
        raise UsageError(
            f"W&B refused the export: {error}\nLog in with `wandb login` or set WANDB_API_KEY; or export with "
            "--offline and upload later with `wandb sync`"
        ) from error
    except ValidationError as error:
        wrong = ", ".join(f"{'.'.join(map(str, e['loc']))} {e['input']!r}: {e['msg']}" for e in error.errors())
        raise UsageError(
            f"W&B does not take what its environment variables (WANDB_...) or settings file say: {wrong}"
        ) from error
    except OSError as error:
        raise StorageError(f"W&B's local folder cannot be written: {error}. WANDB_DIR names another place.") from error
    return exported


def default_run_id(log: Log) -> str:
    """An id that is the same for every export of this run, and of no other."""
    return hashlib.sha256(json.dumps(log.header, sort_keys=True).encode()).hexdigest()[:16]


def _history(log: Log) -> dict[int, dict[str, float]]:
    """Metrics by step: `train/loss`, `eval/loss`, ...; columns that nothing is known of are left out.

    `_timestamp`, which W&B would else set to now, is the time of the step's last record.
    """
    history: dict[int, dict[str, float]] = {}
    tables = [("train", log.train), ("eval", log.eval), ("gpu", log.gpu)]
    for kind, table in tables:
        known = {name for name, values in table.items() if name not in OURS and not np.isnan(values).all()}
        for row, step in enumerate(table["step"].tolist()):
            values = {(n if n == "epoch" else f"{kind}/{n}"): float(table[n][row]) for n in table if n in known}
            if not np.isnan(written := float(table["time"][row])):
                values["_timestamp"] = written
            history.setdefault(step, {}).update(values)
    for name, (steps, numbers) in log.metrics.items():
        for step, value in zip(steps.tolist(), numbers.tolist(), strict=True):
            history.setdefault(step, {})[f"metrics/{name}"] = value
    return dict(sorted(history.items()))


def _samples(log: Log) -> dict[int, list[list[str]]]:
    """The completions of --sample-prompts by step, as rows of SAMPLES; chats and tokens are JSON."""
    found = {}
    for event in log.events:
        if event["type"] == "samples":
            found[event["step"]] = [
                [_as_text(asked_of(one)), _as_text(answer_of(one)), one["end"]] for one in event["samples"]
            ]
    return found


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _config(log: Log) -> dict[str, Any]:
    options = log.header.get("options")
    others = {name: log.header[name] for name in ("system", "model", "dataset", "allocator") if log.header.get(name)}
    return {
        **(dict(options) if isinstance(options, Mapping) else {}),
        "llmq": {"version": log.header.get("version"), **others},
    }


def _summary(log: Log) -> dict[str, Any]:
    """How the run ended, if it did."""
    ends = [event for event in log.events if event["type"] == "end"]
    return {f"end/{k}": v for k, v in ends[-1].items() if k not in ("type", *OURS)} if ends else {}
