"""A report of runs: one HTML file with curves, tables and texts, which needs nothing beside itself.

The page is a template (llmq/report/html/page.html), which escapes all that comes from a log. Its one script draws the
charts from JSON in the page. A policy in its head lets no other script run, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

import llmq
from llmq.disk import write_whole
from llmq.errors import DataError
from llmq.report import charts, facts
from llmq.report.read import Log, labels
from llmq.training.log import GOING_BACK

FOLDER = Path(__file__).parent / "html"
SECTIONS = {
    "curves": "Curves",
    "metrics": "Metrics",
    "speed": "Speed",
    "memory": "Memory",
    "gpu": "GPU",
    "fp8": "fp8",
    "samples": "Samples",
    "events": "Events",
    "options": "Options",
}
ALWAYS = ("curves", "speed", "events", "options")
MOST_LOST = 300  # steps that were not finite, marked in a chart


def write_report(logs: Sequence[Log], out: Path, *, bench: Path | None = None) -> Path:
    """Writes the report of runs by their logs to `out`, an HTML file, and returns its path.

    `bench` is a file of `llmq-bench --save`, whose ladder is shown. DataError for one that cannot be read, StorageError
    when `out` cannot be written.
    """
    write_whole(Path(out), page(logs, ladders=read_ladders(bench)))
    return Path(out)


def read_ladders(bench: Path | None) -> list[Any]:
    """The ladders of a file of `llmq-bench --save`; none without one. DataError for a file that is no such file."""
    if bench is None:
        return []
    try:
        return list(facts.bench(json.loads(bench.read_bytes())))
    except OSError as error:
        raise DataError(f"{bench} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{bench} is no file of llmq-bench --save: {type(error).__name__} {error}") from error


def page(logs: Sequence[Log], *, ladders: Sequence[Any] = (), watch_ms: int = 0) -> bytes:
    """The page, in UTF-8; with `watch_ms` it asks its server for news after this time, again and again."""
    with np.errstate(all="ignore"):  # what is not finite is shown as such
        names = labels(logs)
        runs = [_run(log, label, place) for place, (log, label) in enumerate(zip(logs, names, strict=True))]
        (drawn, steady), memory = charts.charts(logs), facts.memory(logs)
        axes = [{**charts.axes(log), **_marks(log)} for log in logs]
        about: dict[str, Any] = {
            "title": names[0] if len(logs) == 1 else f"{len(logs)} runs",
            "several": len(logs) > 1,
            "runs": runs,
            "fact_names": list(dict.fromkeys(fact.name for run in runs for fact in run["summary"])),
            "charts": [{name: one[name] for name in ("id", "title", "unit", "section")} for one in drawn],
            "steady": steady,
            "memory": memory,
            "largest": max((d or 0.0 for _, cells, is_used in memory if is_used for d, _ in cells), default=0.0) or 1.0,
            "hosted": any(host for _, cells, _ in memory for _, host in cells),
            "numbers": facts.numbers(logs),
            "options": facts.options(logs),
            "bench": ladders,
            "data": {"labels": names, "charts": drawn, "axes": axes},
        }
    shown = {*ALWAYS, *(chart["section"] for chart in drawn), *(name for name, found in steady.items() if found)}
    shown |= {"memory"} if memory else set()
    shown |= {"samples"} if any(run["samples"] for run in runs) else set()
    about |= {"shown": shown, "sections": [(id, name) for id, name in SECTIONS.items() if id in shown]}
    script = _read("page.js")
    written = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    own = {"style": _read("page.css"), "script": script, "policy": policy(), "watch_ms": watch_ms}
    text = _template().render(**about, **own, version=llmq.__version__, written=written)
    return text.encode("utf-8", "backslashreplace")  # half a pair of surrogates is no character


@cache
def policy() -> str:
    """What the page may do: run the one script that it has, and ask its own server."""
    digest = base64.b64encode(hashlib.sha256(_read("page.js").encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def _run(log: Log, label: str, place: int) -> dict[str, Any]:
    """What the template shows of one run."""
    summary, (step, copies) = facts.summary(log), facts.copies(log)
    samples = [{**one, "place": number} for number, one in enumerate(facts.samples(log))]
    return {
        "label": label,
        "place": place,
        "summary": summary,
        "facts": {fact.name: fact for fact in summary},
        "about": facts.about(log),
        "warnings": facts.warnings(log),
        "ladder": facts.ladder(log),
        "time": facts.time_of(log),
        "throttling": facts.throttling(log),
        "copies_step": step,
        "copies": copies,
        "events": facts.events(log),
        "changes": facts.changes(log),
        "setting": facts.setting(log),
        "samples": samples,
    }


def _marks(log: Log) -> dict[str, list[int]]:
    """Steps that charts mark: where the run was resumed or went back to, and those without an update."""
    lost = [*charts.lost_steps(log)]
    every = -(-len(lost) // MOST_LOST) or 1
    return {"resumed": [event["step"] for event in log.events if event["type"] in GOING_BACK], "lost": lost[::every]}


@cache
def _read(name: str) -> str:
    return (FOLDER / name).read_text("utf-8")


@cache
def _template() -> Any:
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(_read("page.html"))
