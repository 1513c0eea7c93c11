"""Reads a run's log: header, and the train and eval records as columns. Format: llmq/training/log.py. Logs of llm.q are
read as such records (llmq/report/llm_q.py)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from llmq.errors import DataError
from llmq.report import llm_q
from llmq.training.log import GOING_BACK, SCHEMA, SECTIONS
from llmq.training.records import EvalRecord, GpuRecord, TrainRecord

TABLES = {  # the numbers of each kind of record
    "train": (*(f.name for f in fields(TrainRecord)), "tps", "time"),
    "eval": (*(f.name for f in fields(EvalRecord)), "tps", "time"),
    "gpu": (*(f.name for f in fields(GpuRecord) if f.name != "throttled"), "time"),
}
OF_STEPS = (*TABLES, "metrics", "samples", "fp8")  # what belongs to steps, and goes with them
FIELDS: dict[str, dict[str, type[Any]]] = {  # what a record has, and of which kind; more is allowed
    "metrics": {"values": dict},
    "samples": {"samples": list},
    "fp8": {"copies": list},
    "notice": {"text": str},
    "checkpoint": {"path": str},
}
WORDS: dict[Any, str] = {dict: "an object", list: "a list", str: "text"}
ASKED = ("prompt", "messages", "tokens")  # one of which a sample completes
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Log:
    """A log as read, without what a resume dropped. Tables are columns by name: `step` int64, all others float64 (NaN
    where not known)."""

    path: Path
    header: dict[str, Any]
    train: dict[str, np.ndarray]
    eval: dict[str, np.ndarray]
    eval_set: np.ndarray  # of each evaluation: a number, the same for those on the same held-out tokens
    gpu: dict[str, np.ndarray]
    throttled: dict[str, np.ndarray]  # steps at whose readings of the GPU its clocks were held down, by the reason
    metrics: dict[str, tuple[np.ndarray, np.ndarray]]  # that callbacks logged, by name: steps int64, values float64
    events: tuple[dict[str, Any], ...]  # every other record, in order

    @property
    def name(self) -> str:
        """The run's name."""
        return run_name(self.path, self.header)

    @property
    def last_step(self) -> int:
        """The last step that was trained or evaluated; 0 before the first."""
        return int(max(self.train["step"].max(initial=0), self.eval["step"].max(initial=0)))

    @property
    def tokens_per_second(self) -> float:
        """The median step's; NaN where none is known."""
        known = self.train["tps"][np.isfinite(self.train["tps"])]
        return float(np.median(known)) if known.size else math.nan


def run_name(path: Path, header: Mapping[str, Any]) -> str:
    """The name of the run of a log: option `name`, else the folder's, else the file's."""
    named = (header.get("options") or {}).get("name")
    generic = path.stem in ("log", "train", "metrics")
    return str(named or (path.resolve().parent.name if generic else path.stem) or path.name)


def find_log(run: Path) -> Path:
    """The log of a run: `run` itself if it is a file, else log.jsonl or the only .jsonl file in the folder, or
    log.json, which is llm.q's."""
    if run.is_file():
        return run
    if not run.exists():
        raise DataError(f"there is no run folder or log at {run}")
    if (run / "log.jsonl").is_file():
        return run / "log.jsonl"
    found = sorted(run.glob("*.jsonl"))
    if not found and (run / "log.json").is_file():
        return run / "log.json"
    if len(found) != 1:
        what = "no .jsonl file" if not found else "several: " + ", ".join(p.name for p in found)
        raise DataError(f"the folder {run} has no log.jsonl, and {what}. Name the log file itself.")
    return found[0]


def read_log(path: Path) -> Log:
    """Reads a log file, or the log in a run folder; see llmq/training/log.py for what counts.

    DataError naming the file and every bad line (at most ten), for a missing or foreign header, or a newer schema.
    """
    path, records = find_log(Path(path)), read_records(path)
    return _log(path, records[0], kept(records)[1:])


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a log, the header first, also what a resume dropped later. DataError as for `read_log`."""
    path = find_log(Path(path))
    with _readable(path):
        content = path.read_bytes()
    bad: list[str] = []
    if llm_q.is_log(content):
        records = _of_llm_q(content, bad)
    else:
        *lines, torn = content.split(b"\n")
        records = _of_lines(lines, bad)
        with suppress(ValueError, RecursionError):  # the unfinished last line of a killed process
            records += [_checked(_parse(torn))] if torn else []
    _refuse_bad(path, bad)
    _refuse_foreign(path, records)
    return records


def kept(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of a log, without those of steps that a resume or a rollback after them dropped."""
    found, last = list[dict[str, Any]](), math.inf
    for record in reversed(records):
        last = min(last, record["step"]) if record["type"] in GOING_BACK else last
        if record["type"] not in OF_STEPS or record["step"] <= last:
            found.append(record)
    return found[::-1]


class LogTail:
    """A log that may still grow: `new` gives what was added since the last time. DataError as for `read_log`."""

    def __init__(self, path: Path) -> None:
        self.path, self.header = find_log(Path(path)), dict[str, Any]()
        with _readable(self.path):
            self._file = open(self.path, "rb")  # noqa: SIM115
        self._end = self._lines = 0  # of what was read

    def new(self) -> list[dict[str, Any]]:
        """The records of whole lines, the header among them."""
        with _readable(self.path):
            self._file.seek(self._end)  # a run that goes on removes a line that another has not finished
            lines = self._file.read().split(b"\n")[:-1]
        bad: list[str] = []
        records = _of_lines(lines, bad, first=self._lines + 1)
        _refuse_bad(self.path, bad)
        self._lines, self._end = self._lines + len(lines), self._end + sum(len(line) + 1 for line in lines)
        if records and not self.header:
            _refuse_foreign(self.path, records)
            self.header = records[0]
        return records

    @property
    def is_replaced(self) -> bool:
        """Whether the path is that of another file now: another run has begun there."""
        with suppress(FileNotFoundError):
            there, mine = self.path.stat(), os.fstat(self._file.fileno())
            return not os.path.samestat(there, mine) or there.st_size < self._end
        return False

    def __enter__(self) -> LogTail:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"the log {path} cannot be read: {error.strerror or error}") from error


def _refuse_bad(path: Path, bad: Sequence[str]) -> None:
    if bad:
        more = f"\n  and {len(bad) - 10} more" if len(bad) > 10 else ""
        raise DataError(f"the log {path} is corrupt:\n" + "\n".join(bad[:10]) + more)


def _refuse_foreign(path: Path, records: Sequence[dict[str, Any]]) -> None:
    if not records or records[0]["type"] != "header":
        raise DataError(f"{path} is not a log of llmq: its first line is not a header record")
    if (schema := records[0].get("schema")) != SCHEMA:
        raise DataError(f"the log {path} has schema {schema!r}, this llmq reads {SCHEMA}: update llmq")


def _of_lines(lines: Iterable[bytes], bad: list[str], first: int = 1) -> list[dict[str, Any]]:
    """Checked records, one a line, the first of which has this number; adds to `bad` what is wrong with a line."""
    records = []
    for number, line in enumerate(lines, first):
        try:
            records.append(_checked(_parse(line)))
        except (ValueError, RecursionError) as error:
            bad.append(f"  line {number}: {error}")
    return records


def _of_llm_q(content: bytes, bad: list[str]) -> list[dict[str, Any]]:
    """Checked records of a log of llm.q."""
    records = []
    for record in llm_q.records(content, bad):
        try:
            records.append(_checked(record))
        except ValueError as error:
            bad.append(f"  {record['type']} at step {record.get('step')}: {error}")
    return records


def _log(path: Path, header: dict[str, Any], records: Iterable[dict[str, Any]]) -> Log:
    """The log of these records, of which no resume drops any."""
    tables: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in TABLES}
    events, held, sets = [], _held_out(header), dict[int, tuple[str, Any]]()
    for record in records:
        if record["type"] in tables:
            tables[record["type"]][record["step"]] = record
            sets |= {record["step"]: (held, record.get("trained_tokens"))} if record["type"] == "eval" else {}
            continue
        events.append(record)
        if record["type"] in GOING_BACK and "dataset" in record:
            held = _held_out(record)
    columns = {kind: _columns(tables[kind], names) for kind, names in TABLES.items()}
    numbers = {one: number for number, one in enumerate(dict.fromkeys(sets.values()))}
    eval_set = np.array([numbers[sets[step]] for step in columns["eval"]["step"].tolist()], np.int64)
    return Log(
        path=path,
        header=header,
        **columns,
        eval_set=eval_set,
        throttled=_throttled(tables["gpu"]),
        metrics=_metrics(events),
        events=tuple(events),
    )


def _throttled(readings: Mapping[int, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The steps of readings that name a reason, by reason."""
    found: dict[str, list[int]] = {}
    for step in sorted(readings):
        for reason in readings[step].get("throttled") or ():
            found.setdefault(reason, []).append(step)
    return {reason: np.array(steps, np.int64) for reason, steps in found.items()}


def _metrics(events: Iterable[Mapping[str, Any]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What callbacks logged, by name and in the order of the steps; the last value of a step counts."""
    found: dict[str, dict[int, float]] = {}
    for event in events:
        for name, value in event["values"].items() if event["type"] == "metrics" else ():
            found.setdefault(name, {})[event["step"]] = _number(value)
    return {
        name: (np.array(sorted(values), np.int64), np.array([values[step] for step in sorted(values)], np.float64))
        for name, values in found.items()
    }


def _held_out(record: Mapping[str, Any]) -> str:
    """The held-out files of a header or a resumed run, as text."""
    dataset = record.get("dataset")
    return json.dumps(dataset.get("eval") if isinstance(dataset, dict) else None)


def runs_in(path: Path) -> list[Path]:
    """A run alone, or all runs in a folder of runs."""
    inner = [] if any(path.glob("*.jsonl")) else sorted(log.parent for log in path.glob("*/log.jsonl"))
    return inner or [path]


def read_runs(runs: Iterable[Path], *, begun: bool = True) -> list[Log]:
    """The logs of run folders or log files, or of all runs in a folder of runs that have steps.

    DataError names all that cannot be read or have no steps yet; those are taken where none need have `begun`.
    """
    logs, problems = [], []
    for path in map(Path, runs):
        try:
            found = [read_log(run) for run in runs_in(path)]
            kept = [log for log in found if log.train["step"].size or log.eval["step"].size]
            if begun and not kept:
                raise DataError(f"the log {found[0].path} has no steps yet")
            logs += kept or found
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return logs


def labels(logs: Sequence[Log]) -> list[str]:
    """The names of the runs, as they can be printed; where two are the same, their places, which differ."""
    names = [log.name for log in logs]
    if len(set(names)) < len(names):
        names = [str(log.path.parent if log.path.stem == "log" else log.path) for log in logs]
    return [name.encode("utf-8", "backslashreplace").decode("utf-8") for name in names]


def _parse(line: bytes) -> dict[str, Any]:
    """One line as a record; ValueError with what is wrong."""
    record = json.loads(line, parse_constant=_refuse)
    if not isinstance(record, dict) or not isinstance(record.get("type"), str):
        raise ValueError("not a JSON object with a type")
    return record


def _checked(record: dict[str, Any]) -> dict[str, Any]:
    """The record, whose fields are of the kinds that readers rely on; ValueError with what is wrong."""
    kind, step = record["type"], record.get("step")
    has_step = kind in (*OF_STEPS, *GOING_BACK) or step is not None
    if has_step and (type(step) is not int or not 0 <= step < 2**63):
        raise ValueError(f"step is {step!r}, not a count")
    fields = FIELDS.get(kind, {})
    if kind in ("header", "resume"):
        fields = {name: dict for name in SECTIONS if record.get(name) is not None}
    if wrong := [f"{name} is not {WORDS[of]}" for name, of in fields.items() if not isinstance(record.get(name), of)]:
        raise ValueError(", ".join(wrong))
    if kind == "samples" and not all(map(_is_sample, record["samples"])):
        raise ValueError("samples are not what --sample-prompts writes")
    if kind == "fp8" and not all(map(_is_copy, record["copies"])):
        raise ValueError("copies are not readings of fp8 errors")
    if kind == "gpu" and not _are_texts(record.get("throttled") or []):
        raise ValueError("throttled is not a list of reasons")
    numbers = {name: record[name] for name in (*TABLES.get(kind, ()), "time") if name in record}
    numbers |= record["values"] if kind == "metrics" else {}
    if unknown := [f"{name} is {value!r}" for name, value in numbers.items() if not _is_number(value)]:
        raise ValueError("not a number: " + ", ".join(unknown))
    return record


def _is_sample(one: Any) -> bool:
    """Whether `asked_of` and `answer_of` (llmq/training/records.py) find what they look for."""
    return isinstance(one, dict) and {"text", "new_tokens", "end"} <= one.keys() and any(name in one for name in ASKED)


def _is_copy(one: Any) -> bool:
    numbers = ("amax", "snr_db", "clipped", "flushed")
    if not isinstance(one, dict) or not isinstance(one.get("name"), str) or not _are_texts(one.get("sites")):
        return False
    return all(name in one and _is_number(one[name]) for name in numbers)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value in NON_FINITE
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _number(value: Any) -> float:
    return math.nan if value is None else NON_FINITE[value] if isinstance(value, str) else float(value)


def _columns(rows: Mapping[int, Mapping[str, Any]], names: Iterable[str]) -> dict[str, np.ndarray]:
    """Columns of the records, ordered by step."""
    ordered = [rows[step] for step in sorted(rows)]
    table = {name: np.array([_number(row.get(name)) for row in ordered], np.float64) for name in names}
    return {**table, "step": np.array([row["step"] for row in ordered], np.int64)}
