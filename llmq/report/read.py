"""Reads a run's log: header, and the train and eval records as columns. Format: llmq/training/log.py."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from llmq.errors import DataError
from llmq.training.log import SCHEMA
from llmq.training.records import EvalRecord, GpuRecord, TrainRecord

TABLES = {  # the numbers of each kind of record
    "train": (*(f.name for f in fields(TrainRecord)), "tps", "time"),
    "eval": (*(f.name for f in fields(EvalRecord)), "tps", "time"),
    "gpu": (*(f.name for f in fields(GpuRecord) if f.name != "throttled"), "time"),
}
OF_STEPS = ("metrics", "samples", "fp8")  # events that belong to steps, and go with them
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
    metrics: dict[str, tuple[np.ndarray, np.ndarray]]  # that callbacks logged, by name: steps int64, values float64
    events: tuple[dict[str, Any], ...]  # every other record, in order

    @property
    def name(self) -> str:
        """The run's name: option `name`, else the folder's, else the file's."""
        named = (self.header.get("options") or {}).get("name")
        generic = self.path.stem in ("log", "train", "metrics")
        return str(named or (self.path.resolve().parent.name if generic else self.path.stem) or self.path.name)

    @property
    def last_step(self) -> int:
        """The last step that was trained or evaluated; 0 before the first."""
        return int(max(self.train["step"].max(initial=0), self.eval["step"].max(initial=0)))

    @property
    def tokens_per_second(self) -> float:
        """The median step's; NaN where none is known."""
        known = self.train["tps"][np.isfinite(self.train["tps"])]
        return float(np.median(known)) if known.size else math.nan


def find_log(run: Path) -> Path:
    """The log of a run: `run` itself if it is a file, else log.jsonl or the only .jsonl file in the folder."""
    if run.is_file():
        return run
    if not run.exists():
        raise DataError(f"there is no run folder or log at {run}")
    if (run / "log.jsonl").is_file():
        return run / "log.jsonl"
    found = sorted(run.glob("*.jsonl"))
    if len(found) != 1:
        what = "no .jsonl file" if not found else "several: " + ", ".join(p.name for p in found)
        raise DataError(f"the folder {run} has no log.jsonl, and {what}. Name the log file itself.")
    return found[0]


def read_log(path: Path) -> Log:
    """Reads a log file, or the log in a run folder; see llmq/training/log.py for what counts.

    DataError naming the file and every bad line (at most ten), for a missing or foreign header, or a newer schema.
    """
    path = find_log(Path(path))
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"the log {path} cannot be read: {error.strerror or error}") from error
    torn = lines.pop()
    records, bad = [], []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_parse(line))
        except (ValueError, RecursionError) as error:
            bad.append(f"  line {number}: {error}")
    if torn and not bad:
        try:
            records.append(_parse(torn))
        except (ValueError, RecursionError):
            pass  # the unfinished last line of a killed process
    if bad:
        more = f"\n  and {len(bad) - 10} more" if len(bad) > 10 else ""
        raise DataError(f"the log {path} is corrupt:\n" + "\n".join(bad[:10]) + more)
    if not records or records[0]["type"] != "header":
        raise DataError(f"{path} is not a log of llmq: its first line is not a header record")
    header = records[0]
    if header.get("schema") != SCHEMA:
        raise DataError(f"the log {path} has schema {header.get('schema')!r}, this llmq reads {SCHEMA}: update llmq")
    tables: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in TABLES}
    events, held, sets = [], _held_out(header), dict[int, tuple[str, Any]]()
    for record in records[1:]:
        if record["type"] in tables:
            tables[record["type"]][record["step"]] = record
            sets |= {record["step"]: (held, record.get("trained_tokens"))} if record["type"] == "eval" else {}
            continue
        events.append(record)
        if record["type"] == "resume":
            held = _held_out(record)
            events = [one for one in events if one["type"] not in OF_STEPS or one["step"] <= record["step"]]
            for kind, table in tables.items():
                tables[kind] = {step: row for step, row in table.items() if step <= record["step"]}
    columns = {kind: _columns(tables[kind], names) for kind, names in TABLES.items()}
    numbers = {one: number for number, one in enumerate(dict.fromkeys(sets.values()))}
    eval_set = np.array([numbers[sets[step]] for step in columns["eval"]["step"].tolist()], np.int64)
    return Log(
        path, header, columns["train"], columns["eval"], eval_set, columns["gpu"], _metrics(events), tuple(events)
    )


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


def read_runs(runs: Iterable[Path]) -> list[Log]:
    """The logs of run folders or log files, or of all runs in a folder of runs that have steps.

    DataError names all that cannot be read or have no steps yet.
    """
    logs, problems = [], []
    for path in map(Path, runs):
        inner = [] if any(path.glob("*.jsonl")) else sorted(log.parent for log in path.glob("*/log.jsonl"))
        try:
            found = [read_log(run) for run in inner or [path]]
            begun = [log for log in found if log.train["step"].size or log.eval["step"].size]
            if not begun:
                raise DataError(f"the log {found[0].path} has no steps yet")
            logs += begun
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
    """One record, checked; ValueError with what is wrong."""
    record = json.loads(line, parse_constant=_refuse)
    if not isinstance(record, dict) or not isinstance(record.get("type"), str):
        raise ValueError("not a JSON object with a type")
    kind = record["type"]
    if kind in (*TABLES, *OF_STEPS, "resume"):
        step = record.get("step")
        if type(step) is not int or not 0 <= step < 2**63:
            raise ValueError(f"step is {step!r}, not a count")
    if kind == "header" and not isinstance(record.get("options"), (dict, type(None))):
        raise ValueError("options are not an object")
    if kind == "metrics" and not isinstance(record.get("values"), dict):
        raise ValueError("values are not an object")
    numbers = record["values"] if kind == "metrics" else {c: record[c] for c in TABLES.get(kind, ()) if c in record}
    wrong = [f"{name} is {value!r}" for name, value in numbers.items() if not _is_number(value)]
    if wrong:
        raise ValueError("not a number: " + ", ".join(wrong))
    return record


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
