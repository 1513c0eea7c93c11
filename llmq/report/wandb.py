"""A log to Weights & Biases, once or as it grows: what `--report-to wandb` sends of a run, at the same names and steps.

The run's id comes from the log's header, so exporting the same log again finds the same run, also one that was sent
live, and only the steps that W&B does not have yet are sent (W&B's history cannot be rewritten: steps of an abandoned
line stay there).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmq.errors import DataError, StorageError, UsageError
from llmq.report.read import LogTail, find_log, kept, read_records, run_name
from llmq.training.trackers import Sender, TrackedRun, config_of, numbers_of, run_id_of
from llmq.training.trackers.wandb import INSTALL, Wandb

POLL_S = 2.0  # from one look at a log that grows to the next


@dataclass(frozen=True)
class Exported:
    """Where the run is: `url` online, else None; `folder` is W&B's local copy, which `wandb sync` uploads."""

    run_id: str
    url: str | None
    folder: Path
    num_steps: int  # sent by this export


def export_wandb(log_file: Path, *, run_id: str | None = None, **where: Any) -> Exported:
    """Sends the log (a file, or the run folder) to W&B, or with `offline` or WANDB_MODE=offline to a folder for later;
    `where` as for `WandbExport`.

    DataError for a log that cannot be read, UsageError without wandb, without a login, or when W&B refuses,
    StorageError when its local folder cannot be written.
    """
    path, records = find_log(Path(log_file)), read_records(log_file)
    if not any(map(numbers_of, records)):
        raise DataError(f"the log {path} has no steps yet")
    export = WandbExport(path, records[0], run_id, **where)
    export.send(records)
    return export.close()


def follow_wandb(log_file: Path, *, run_id: str | None = None, **where: Any) -> Iterator[Exported]:
    """Sends a log as it grows, until its run ends or KeyboardInterrupt; errors as above.

    Where another run begins a log of its own at the path, that one follows as another run, unless `run_id` names one.
    """
    goes_on = True
    while goes_on:
        with LogTail(log_file) as tail:
            export = None
            try:
                for records in _growing(tail):
                    export = export or WandbExport(tail.path, tail.header, run_id, **where)
                    export.send(records)
                goes_on = tail.is_replaced and run_id is None
            except KeyboardInterrupt:
                goes_on = False
        if export is not None:
            yield export.close()


def _growing(tail: LogTail) -> Iterator[list[dict[str, Any]]]:
    """The records that are added to a log, until its run has ended or another one has taken its place."""
    is_over = False
    while not is_over:
        is_over = tail.is_replaced  # before reading: nothing is added to it afterwards
        if records := tail.new():
            yield records
            is_over |= records[-1]["type"] == "end"
        if not is_over:
            time.sleep(POLL_S)


class WandbExport:
    """A run of W&B that gets a log. UsageError, StorageError as above."""

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        run_id: str | None = None,
        *,
        project: str = "llmq",
        name: str | None = None,
        entity: str | None = None,
        offline: bool = False,
    ) -> None:
        self._id = run_id or run_id_of(header)
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self._id):
            raise UsageError(f"--run-id {run_id!r} is not an id for W&B: use up to 64 letters, digits, '-' and '_'")
        mode = "offline" if offline else os.environ.get("WANDB_MODE") or "online"
        self._tracker = Wandb(project, entity, name, mode=mode, patience=0)
        with _explained():
            run = TrackedRun(self._id, run_name(path, header), path.parent, config_of(header))
            self._sender = Sender(self._tracker, run)

    def send(self, records: Sequence[dict[str, Any]]) -> None:
        """Sends what counts of these records, and what W&B does not have yet, in the order of the steps."""
        with _explained():
            for record in sorted(kept(records), key=lambda record: record.get("step", 0)):
                self._sender.take(record)

    def close(self) -> Exported:
        """Ends W&B's run; where it is."""
        done = Exported(self._id, self._tracker.url, self._tracker.folder, len(self._sender.steps))
        with _explained():
            self._sender.close()
        return done


@contextmanager
def _explained() -> Iterator[None]:
    try:
        import wandb
    except ImportError as error:
        raise UsageError(f"the export needs wandb, which cannot be imported here ({error}): {INSTALL}") from error
    try:
        yield
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
