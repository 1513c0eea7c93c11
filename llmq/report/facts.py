"""The facts of a report beside its curves: how runs went, where their time and memory went, what happened, what they
wrote, and how their options differ. All of it is text and numbers for the page's template, which escapes it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np

from llmq.disk import MIB, shown
from llmq.options.parse import descriptions
from llmq.report.charts import elapsed_s, is_number, lost_steps, strides, tokens_so_far
from llmq.report.read import Log
from llmq.training.fp8 import LEAST_SNR_DB
from llmq.training.log import GOING_BACK
from llmq.training.records import answer_of, asked_of

LAST = 30  # steps at the end that the training loss is the mean of
LONGEST = 4000  # characters of a text
RECENT_S = 900.0  # a run without an end that has written a step since then is running
MOST_EVENTS, MOST_ANSWERS, MOST_PROMPTS, MOST_COPIES, ROWS = 300, 12, 40, 12, 20
UNLISTED = ("metrics", "samples", "fp8", "algorithms")  # what has its own place, or none
COMPARED = ("options", "system", "dataset")  # sections whose changes a resume shows
UNKNOWN = "-"
NOT_USED = ("Free", "Reserved")  # rows of the memory table


@dataclass(frozen=True)
class Fact:
    """A number of a run as text, with a note."""

    name: str
    value: str
    note: str = ""


def summary(log: Log) -> list[Fact]:
    """What there is to know of a run at a glance; the same facts in the same order for every run."""
    train, evals = log.train, log.eval
    steps, total = log.last_step, (log.header.get("dataset") or {}).get("steps")
    of = f"of {total:,}, {100 * steps / total:.0f}%" if type(total) is int and total > 0 else ""
    late = train["loss"][train["step"] > steps - LAST]
    late = late[np.isfinite(late)]
    same = evals["loss"][log.eval_set == log.eval_set[-1:]]  # on the tokens of the last one
    at = evals["step"][log.eval_set == log.eval_set[-1:]]
    best = int(np.nanargmin(same)) if np.isfinite(same).any() else None
    seconds, tokens = elapsed_s(log), tokens_so_far(log)
    lost, warned = len(lost_steps(log)), len(warnings(log))
    facts = [
        _state(log),
        Fact("Steps", f"{steps:,}", of),
        Fact(
            "Training loss",
            _loss(late.mean()) if late.size else UNKNOWN,
            f"mean of {late.size}" if late.size > 1 else "",
        ),
        Fact(
            "Evaluation loss",
            _loss(same[-1]) if same.size else UNKNOWN,
            "" if best is None else f"best {_loss(same[best])} at {at[best]:,}",
        ),
        Fact("Speed", _rate(_median(train["tps"])), "tokens/s"),
        Fact("Speed of light", _percent(_median(train["sol"])), "of the peak"),
        Fact("Memory", _size(train["memory_mib"]), "most in use"),
        Fact(
            "Time",
            duration(seconds[-1]) if seconds.size else UNKNOWN,
            f"{_count(tokens[-1])} tokens{_left(log, total, seconds)}" if tokens.size else "",
        ),
        Fact(
            "Trouble", f"{warned:,}" if warned else "none", f"{lost:,} steps without an update" if lost else "warnings"
        ),
    ]
    return facts if warned or lost else facts[:-1]


def _end(log: Log) -> Mapping[str, Any] | None:
    """The record of the run's end, if nothing came after it."""
    last = [event for event in log.events if event["type"] in ("end", *GOING_BACK)]
    return last[-1] if last and last[-1]["type"] == "end" else None


def _state(log: Log) -> Fact:
    """How the run ended; without an end whether it still writes its log, by the clock."""
    if (end := _end(log)) is not None:
        return Fact("State", text(end.get("reason") or "ended"))
    heard = [time for time in (*log.train["time"][-1:], *log.eval["time"][-1:]) if is_number(time)]
    is_recent = not heard or time.time() - max(heard) < RECENT_S
    return Fact("State", "running" if is_recent else "no end", f"last step {clock(max(heard))} UTC" if heard else "")


def _left(log: Log, total: Any, seconds: np.ndarray) -> str:
    """How long a run that has not ended still takes, if that is known."""
    steps = log.train["step"]
    if _end(log) is not None or type(total) is not int or steps.size < 2 or steps[-1] >= total:
        return ""
    return f", {duration(float(seconds[-1] - seconds[0]) / int(steps[-1] - steps[0]) * int(total - steps[-1]))} left"


def warnings(log: Log) -> list[str]:
    found = [event["text"] for event in log.events if event["type"] == "notice" and event.get("warning") is True]
    end = _end(log) or {}
    return list(dict.fromkeys([*found, *(text(one) for one in _listed(end.get("warnings")))]))


def about(log: Log) -> list[tuple[str, str]]:
    """A run in words: model, device, data, when it began."""
    header = log.header
    model, system = header.get("model") or {}, header.get("system") or {}
    size: Any = model.get("parameters")
    count = f", {size / 1e6:,.1f} million parameters" if is_number(size) and 1e5 <= size < 1e18 else ""
    found = {
        "model": f"{text(model['path'])}{count}" if model.get("path") else "",
        "device": text(system.get("device", "")).removeprefix("cuda: "),
        "begun": text(header.get("started") or (clock(header["time"]) if is_number(header.get("time")) else "")),
        "log": str(log.path),
    }
    return [(name, value) for name, value in found.items() if value]


def time_of(log: Log) -> list[tuple[str, float, str]]:
    """Where the time went: what for, its share, and a text. The first part is what the matmuls alone would take at the
    device's peak: the speed of light."""
    train, weight = log.train, strides(log) / 1000
    stepping = float(np.nansum(train["time_ms"] * weight))
    waiting = float(np.nansum(train["wait_ms"] * weight))
    light = float(np.nansum(train["time_ms"] * train["sol"] * weight))
    evaluating = float(np.nansum(log.eval["time_ms"])) / 1000
    seconds = elapsed_s(log)
    total = max(float(seconds[-1]) if seconds.size else 0.0, stepping + evaluating)
    if not (math.isfinite(total) and total > 0 and all(map(math.isfinite, (stepping, waiting, light, evaluating)))):
        return []
    parts = {
        "matmuls at the peak (speed of light)": light,
        "the rest of the steps": stepping - waiting - light,
        "waiting for data": waiting,
        "evaluating": evaluating,
        "between steps: saving, sampling, logging": total - stepping - evaluating,
    }
    return [(name, max(took / total, 0.0), duration(took)) for name, took in parts.items() if took > 0.0005 * total]


def ladder(log: Log) -> list[tuple[str, float | None, float | None]]:
    """From the speed of light down to what was reached: what, tokens/s, and the share of the speed of light."""
    train, seconds, tokens = log.train, elapsed_s(log), tokens_so_far(log)
    with np.errstate(all="ignore"):
        light = _median(train["tps"] / train["sol"])
        waiting = train["tps"] / (1 - train["wait_ms"] / train["time_ms"])
    done = float(tokens[-1] - tokens[0] + np.nan_to_num(train["tokens"][0])) if tokens.size else 0.0
    rungs = {
        "speed of light: matmuls at the peak": light,
        "best step": float(np.nanmax(train["tps"])) if np.isfinite(train["tps"]).any() else math.nan,
        "median step without waiting for data": _median(waiting),
        "median step": _median(train["tps"]),
        "the whole run, with evaluations and saving": done / float(seconds[-1])
        if seconds.size and seconds[-1]
        else math.nan,
    }
    known = {name: rate for name, rate in rungs.items() if math.isfinite(rate) and rate > 0}
    return [(name, rate, rate / light if light in known.values() else None) for name, rate in known.items()]


def memory(logs: Sequence[Log]) -> list[tuple[str, list[tuple[float | None, float | None]], bool]]:
    """The plan's table: a name, for each run MiB on the device and on the host, and whether the run uses it."""
    tables = [
        [{str(name): size for name, size in (log.header.get(home) or {}).items() if is_number(size)} for log in logs]
        for home in ("allocator", "host_memory")
    ]
    names = list(dict.fromkeys(name for found in tables for table in found for name in table))
    names.sort(key=lambda name: (name in NOT_USED, -max(table.get(name, 0.0) for found in tables for table in found)))
    device, host = tables
    rows = [(name, [(d.get(name), h.get(name)) for d, h in zip(device, host, strict=True)]) for name in names]
    return [(name, cells, name not in NOT_USED) for name, cells in rows if any(one or two for one, two in cells)]


def throttling(log: Log) -> list[tuple[str, float, str]]:
    """Why the GPU's clocks were held down: the reason, the share of the readings, and the steps."""
    count = log.gpu["step"].size
    return [
        (reason, steps.size / count, f"steps {steps[0]:,} to {steps[-1]:,}")
        for reason, steps in sorted(log.throttled.items(), key=lambda one: -one[1].size)
        if count
    ]


def copies(log: Log) -> tuple[int, list[dict[str, Any]]]:
    """The step of the last reading of fp8 errors, and its worst copies; 0 and none without one."""
    readings = [event for event in log.events if event["type"] == "fp8" and event["copies"]]
    if not readings:
        return 0, []
    known = [one for one in readings[-1]["copies"] if is_number(one["snr_db"])]
    rows = [
        {
            "name": one["name"],
            "sites": ", ".join(one["sites"]),
            "snr": f"{one['snr_db']:.1f}",
            "low": one["snr_db"] < LEAST_SNR_DB.get(one["name"].rsplit("@", 1)[-1], -math.inf),
            **{name: f"{number(one[name])}" for name in ("amax",)},
            **{name: _percent(_float(one[name])) for name in ("clipped", "flushed")},
        }
        for one in sorted(known, key=lambda one: one["snr_db"])
    ]
    return readings[-1]["step"], rows[:MOST_COPIES]


def events(log: Log) -> list[dict[str, Any]]:
    """What happened, in order: when, after which step, its kind, and a text. Of many, warnings and the last ones."""
    rows: list[dict[str, Any]] = []
    for event in log.events:
        kind = event["type"]
        if kind in UNLISTED:
            continue
        is_warning = event.get("warning") is True
        rows.append(
            {
                "when": clock(event["time"]) if is_number(event.get("time")) else "",
                "step": event.get("step"),
                "kind": "warning" if is_warning else kind,
                "text": _told(event),
                "loud": is_warning or kind == "end",
            }
        )
    rows += [
        {"when": "", "step": step, "kind": "not finite", "text": f"The step changed nothing: {what}", "loud": True}
        for step, what in list(lost_steps(log).items())[:ROWS]
        if not any(row["step"] == step and "not finite" in row["text"] for row in rows)
    ]
    late = {id(row) for row in rows[-MOST_EVENTS:]}
    return [row for row in rows if row["loud"] or id(row) in late][-2 * MOST_EVENTS :]


def _told(event: Mapping[str, Any]) -> str:
    kind = event["type"]
    if kind == "notice":
        return cut(event["text"])
    if kind == "checkpoint":
        return cut(event["path"])
    if kind == "resume":
        return f"continued from the checkpoint of step {event['step']:,}"
    if kind == "rollback":
        return f"went back to what it was after step {event['step']:,}"
    facts = {name: value for name, value in event.items() if name not in ("type", "time", "step")}
    if kind == "end":
        reason = text(facts.pop("reason", None) or "ended")
        return cut("; ".join([reason, *(f"{name.replace('_', ' ')} {number(v)}" for name, v in facts.items())]))
    return cut(text(facts))


def changes(log: Log) -> list[tuple[int, list[tuple[str, str, str]]]]:
    """What each resumption changed: its step, and names with old and new values."""
    before, found = log.header, []
    for event in log.events:
        if event["type"] != "resume":
            continue
        rows = []
        for section in COMPARED:
            old, new = before.get(section) or {}, event.get(section) or {}
            names = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
            prefix = "" if section == "options" else f"{section}: "
            rows += [(prefix + text(name), text(old.get(name)), text(new.get(name))) for name in names]
        found.append((event["step"], rows))
        before = event
    return found


def options(logs: Sequence[Log]) -> list[dict[str, Any]]:
    """Every option: its name, the values of the runs, whether they differ, and whether one is no default."""
    tables = [(log.header.get("options") or {}) for log in logs]
    known, rows = descriptions(), []
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name) for table in tables]
        usual: tuple[Any, ...] = (known[name].default, known[name].shown) if name in known else ()
        is_default = all(value in usual or text(value) in usual for value in values)
        differ = any(value != values[0] for value in values)
        rows.append(
            {"name": name, "values": [text(value) for value in values], "differ": differ, "own": not is_default}
        )
    return rows


def setting(log: Log) -> list[tuple[str, list[tuple[str, str]]]]:
    """The other sections of the header, each with names and values."""
    sections = ((name, log.header.get(name) or {}) for name in ("system", "model", "dataset", "matmuls"))
    return [(name, [(text(k), cut(text(v))) for k, v in facts.items()]) for name, facts in sections if facts]


def samples(log: Log) -> list[dict[str, Any]]:
    """Completions by prompt: the prompt, and its answers by step, the newest first, of which some are left out."""
    found: dict[str, dict[int, tuple[str, str]]] = {}
    for event in log.events:
        for one in event["samples"] if event["type"] == "samples" else ():
            found.setdefault(_said(one), {})[event["step"]] = cut(text(answer_of(one))), text(one["end"])
    rows = []
    for asked, answers in list(found.items())[:MOST_PROMPTS]:
        steps = sorted(answers, reverse=True)
        kept = sorted({steps[round(i)] for i in np.linspace(0, len(steps) - 1, MOST_ANSWERS)}, reverse=True)
        rows.append({"prompt": asked, "answers": [(step, *answers[step]) for step in kept], "count": len(steps)})
    return rows


def _said(sample: Mapping[str, Any]) -> str:
    """What is completed, as text: of a chat each message below its role."""
    asked = asked_of(sample)
    if "messages" in sample and isinstance(asked, list) and all(isinstance(one, dict) for one in asked):
        return cut("\n".join(f"{text(one.get('role'))}: {text(one.get('content'))}" for one in asked))
    return cut(text(asked))


def numbers(logs: Sequence[Log]) -> list[tuple[str, list[str]]]:
    """Losses at some steps, for whoever has no script to draw them: means since the row before, the last evaluation."""
    last = max((log.last_step for log in logs), default=0)
    ends = np.unique(np.linspace(0, last, min(ROWS, last) + 1).astype(np.int64))
    rows = []
    for first, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        cells: list[str] = []
        for log in logs:
            for table, one in ((log.train, "mean"), (log.eval, "last")):
                values = table["loss"][(table["step"] > first) & (table["step"] <= end)]
                values = values[np.isfinite(values)]
                cells.append(UNKNOWN if not values.size else _loss(values.mean() if one == "mean" else values[-1]))
        rows.append((f"{end:,}", cells))
    return rows


def bench(content: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The ladders of a file of llmq-bench: a title, and a row for each family of ops. ValueError, KeyError or TypeError
    for a file of another form."""
    if content["kind"] != "llmq-bench":
        raise ValueError(f"its kind is {content['kind']!r}")
    for result in content["results"]:
        whole, gaps = float(result["micro_batch_ms"]), float(result["gaps_ms"])
        title = f"{result['model']}, {result['dtype']}, micro-batch {result['batch_size']} x {result['seq_len']}"
        rungs = [(r["family"], int(r["calls"]), float(r["ms"]), float(r["roofline_ms"])) for r in result["ladder"]]
        rows = [
            {
                "family": str(family),
                "calls": f"{calls:,}",
                "ms": f"{ms:.3f}",
                "share": ms / whole,
                "light": min(light / ms, 1.0) if ms > 0 else 0.0,
            }
            for family, calls, ms, light in rungs
        ]
        rest = {
            "family": "between ops",
            "calls": "",
            "ms": f"{gaps:.3f}",
            "share": max(gaps / whole, 0.0),
            "light": 0.0,
        }
        yield text(title), [*rows, rest]


def text(value: Any) -> str:
    """A value of a record in words."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list) and all(isinstance(one, (str, int, float)) for one in value):
        return ", ".join(map(text, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def number(value: Any) -> str:
    """As text, a number with few digits."""
    return f"{value:.5g}" if is_number(value) else text(value)


def cut(value: str) -> str:
    """A text that is not too long."""
    return value if len(value) <= LONGEST else f"{value[:LONGEST]} … ({len(value):,} characters)"


def clock(time: float) -> str:
    """Seconds since 1970 as a date in UTC; nothing for one that no calendar has."""
    try:
        return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return ""


def duration(seconds: float) -> str:
    """`850 ms`, `12.3 s`, `4:05:06`."""
    if not 0 <= seconds < 1e10:
        return UNKNOWN
    if seconds < 60:
        return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else math.nan


def _float(value: Any) -> float:
    return float(value) if is_number(value) else math.nan


def _loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def _rate(value: float) -> str:
    return UNKNOWN if math.isnan(value) else f"{value:,.0f}" if 100 <= abs(value) < 1e15 else f"{value:.3g}"


def _percent(share: float) -> str:
    return UNKNOWN if math.isnan(share) else f"{100 * share:.3g}%"


def _count(value: float) -> str:
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def _size(mib: np.ndarray) -> str:
    known = mib[np.isfinite(mib)]
    most = float(known.max()) if known.size else math.nan
    return shown(int(most * MIB)) if 0 <= most < 1e12 else UNKNOWN
