"""Trackers: where a run is watched while it trains, by the records of its log.

`Tracker` is a callback that hands each record to a thread of its own. What a record is to a tracker (`Sender`) is the
same for a live run and for a finished log: numbers by name, such as `train/loss`, `eval/loss`, `gpu/watts` and
`metrics/mine`, completions as a table, options as a config.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any

from llmq.errors import UsageError
from llmq.training.callbacks import Callback, Run
from llmq.training.log import GOING_BACK
from llmq.training.records import answer_of, asked_of

MOST_WAITING = 10_000  # records, some MiB: a tracker that is further behind loses some
FLUSH_S = 15.0  # that a run waits at its end for a tracker; Kubernetes kills what has not ended after 30
TABLES = ("train", "eval", "gpu")  # records that are numbers themselves
OURS = ("type", "step", "time")
NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # numbers that JSON has no word for
SAMPLES = ("prompt", "completion", "end")  # columns of the table of a step's completions
SECTIONS = ("system", "model", "dataset", "allocator")  # of a log's header that a tracker's config has

Record = Mapping[str, Any]  # of the log, as its file has it


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers know it. `id` is the same for every process of a run, and of no other run.

    `resumed` is the step of the checkpoint that it continues, None at its start; `sent` the last step that earlier
    processes have sent, -1 if none.
    """

    id: str
    name: str
    folder: Path  # of the log
    config: Mapping[str, Any]  # options, and facts under `llmq`
    resumed: int | None = None
    sent: int = -1


class Tracker(Callback):
    """Sends what a run logs to where it is watched. Subclasses define `open`, `numbers`, `text`, `close`, and `flush`
    where something is collected.

    These run in a thread of their own, on the first rank alone. One that fails, or that is too slow, is said once and
    then left out: it never ends a run or holds up a step.
    """

    title = ""  # in messages; else its class's name
    package, install = "", ""  # that it needs, and how that is installed

    def __init__(self) -> None:
        """UsageError without its package."""
        self.title = self.title or type(self).__name__
        if self.package and find_spec(self.package) is None:
            raise UsageError(f"{self.title} needs {self.package}, which is not installed here: {self.install}")
        self._queue: Queue[Record | None] = Queue(MOST_WAITING)
        self._thread: Thread | None = None
        self._known: Mapping[str, Any] = {}  # the id and the name of the run that is continued
        self._failure, self._lost, self._warned = "", 0, set[str]()

    def open(self, run: TrackedRun) -> int:
        """Begins a run, or goes on with it; the last step that the tracker has, and of which nothing more is sent."""
        return run.sent

    def numbers(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Numbers by name after `step` updates, at a time in seconds since 1970. A step may come several times."""

    def text(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table of texts."""

    def back(self, step: int) -> bool:
        """The run has gone back to a step; whether those after it are to be sent again, in place of what was sent."""
        return False

    def flush(self) -> None:
        """Nothing else waits to be sent."""

    def close(self, end: Mapping[str, Any]) -> None:
        """The run is over: `reason` (finished, interrupted, terminated, failed), its last losses and its warnings;
        empty if it did not come to its end."""

    def state(self) -> Mapping[str, Any]:
        """The id and the name of the run."""
        return self._known

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with that run, if this one has its name."""
        self._known = state

    def on_begin(self, run: Run) -> None:
        """Starts the thread, which gets all records from the first one on."""
        self._run, path, name = run, Path(run.options["log_file"]), run.options["name"]
        is_known = self._known.get("name") == name
        self._known = {"id": self._known["id"] if is_known else run_id_of(first_record(path)), "name": name}
        self._thread = Thread(target=self._work, args=(path, is_known), name=f"llmq {self.title}", daemon=True)
        self._thread.start()
        run.follow(self._take)

    def _take(self, record: Record | None) -> None:
        """A record of the log, None after the last one; on the thread that trains."""
        if self._failure:
            self._warn(f"{self.title} failed, and gets nothing more of this run: {self._failure}")
        elif record is None:
            self._end()
        else:
            try:
                self._queue.put_nowait(record)
            except Full:
                self._lost += 1
                self._warn(f"{self.title} is slower than the run: it does not get all of its records")

    def _end(self) -> None:
        """Waits for what is not sent yet, and no longer than FLUSH_S."""
        assert self._thread is not None
        try:
            self._queue.put(None, timeout=FLUSH_S)
            self._thread.join(FLUSH_S)
        except Full:
            pass
        if self._thread.is_alive() or self._failure:
            why = self._failure or f"it does not answer for {FLUSH_S:.0f} s"
            self._warn(f"{self.title} does not have the end of this run: {why}")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._run.warn(text)

    def _work(self, path: Path, is_known: bool) -> None:
        """Sends records as they come, until the last one."""
        try:
            opening = self._queue.get()
            assert opening is not None
            resumed = opening["step"] if opening["type"] == "resume" else None
            sent = last_step(path, opening) if is_known and resumed is not None else -1
            name, config = self._known["name"], config_of(opening)
            sender = Sender(self, TrackedRun(self._known["id"], name, path.parent, config, resumed, sent))
            while (record := self._queue.get()) is not None:
                sender.take(record)
                if self._queue.empty():
                    self.flush()
            sender.close()
        except BaseException as error:  # SystemExit, too: whatever a library does, the run goes on
            self._failure = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Sender:
    """Sends the records of a log to a tracker, but nothing of steps that it has: what a tracker was sent once it keeps,
    also where a resume or a rollback makes these steps again."""

    def __init__(self, tracker: Tracker, run: TrackedRun) -> None:
        self._tracker, self._end = tracker, dict[str, Any]()
        self._kept = tracker.open(run)
        self.steps = set[int]()  # that were sent

    def take(self, record: Record) -> None:
        """The next record."""
        step, kind = record.get("step", 0), record["type"]
        if kind in ("end", *GOING_BACK):  # a log that goes on after its end has not ended
            self._end = {k: v for k, v in record.items() if k not in OURS} if kind == "end" else {}
        if kind in GOING_BACK and (last := max(self.steps, default=-1)) > step and not self._tracker.back(step):
            self._kept = max(self._kept, last)
        if step <= self._kept:
            return
        if values := numbers_of(record):
            self._tracker.numbers(step, values, record.get("time", math.nan))
            self.steps.add(step)
        if kind == "samples":
            rows = [[_as_text(asked_of(one)), _as_text(answer_of(one)), one["end"]] for one in record["samples"]]
            self._tracker.text(step, "samples", SAMPLES, rows)

    def close(self) -> None:
        """All was sent."""
        self._tracker.close(self._end)


def numbers_of(record: Record) -> dict[str, float]:
    """The numbers of a record by name, without those that are not known. `epoch` is that of steps and evaluations."""
    kind = record["type"]
    found = record["values"] if kind == "metrics" else record if kind in TABLES else {}
    return {
        name if name == "epoch" else f"{kind}/{name}": float(value)
        for name, value in found.items()
        if name not in OURS and (isinstance(value, int | float) or value in NOT_FINITE)
    }


def config_of(record: Record) -> dict[str, Any]:
    """The options of a header or a resumed run, with what is known of its machine, model and data under `llmq`."""
    options = record.get("options")
    others = {name: record[name] for name in SECTIONS if record.get(name)}
    return {
        **(dict(options) if isinstance(options, Mapping) else {}),
        "llmq": {"version": record.get("version"), **others},
    }


def run_id_of(header: Record) -> str:
    """An id that is the same wherever this run is sent from, and no other run's."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()[:16]


def first_record(log_file: Path) -> dict[str, Any]:
    """The header of a log."""
    with open(log_file, "rb") as file:
        found: dict[str, Any] = json.loads(file.readline())
    return found


def last_step(log_file: Path, opening: Record) -> int:
    """The last step that is in a log before the record with which this process has opened it; -1 without any."""
    last = -1
    with open(log_file, "rb") as file:
        for line in file:
            record = json.loads(line)
            if record == opening:
                break
            last = max(last, record["step"] if record["type"] in TABLES else -1)
    return last


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
