"""Findings as lines, as a table on a terminal, or as one JSON document."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

import llmq
from llmq.doctor.checks import examine
from llmq.doctor.finding import FAULT, OK, WARNING, Finding, worst
from llmq.redact import redacted, redacted_in
from llmq.screen import Screen

SCHEMA = 1
STYLES = {OK: "green", WARNING: "yellow", FAULT: "bold red"}
WIDTH = 18  # of names in plain lines


def run(*, as_json: bool, speed: bool) -> int:
    """Checks and shows; 1 if something is at fault."""
    screen, found = Screen(), list[Finding]()
    plain = not as_json and not screen.is_terminal
    waiting = Screen(sys.stderr) if as_json else screen
    with waiting.task("Checking", only_bar=True, after_s=0.0) as report:
        for number, finding in enumerate(examine(speed=speed), 1):
            found.append(finding)
            report(number, None)
            if plain:
                screen.line(line(finding))
    if as_json:
        print(json.dumps(redacted_in(document(found)), indent=1))
    elif plain:
        screen.line(summary(found))
    else:
        console = Console()
        console.print(table(found))
        console.print(summary(found), markup=False, highlight=False)
    return int(worst(found) == FAULT)


def document(found: Sequence[Finding]) -> dict[str, Any]:
    """All of it; `checks` by their names, which stay the same."""
    return {
        "kind": "llmq-doctor",
        "schema": SCHEMA,
        "version": llmq.__version__,
        "status": worst(list(found)),
        "checks": [asdict(one) for one in found],
    }


def line(one: Finding) -> str:
    """One in one line."""
    return f"{one.status:8}{one.name:{WIDTH}} {one}"


def table(found: Sequence[Finding]) -> Table:
    """All in the width of the terminal."""
    made = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for one in found:
        style = STYLES[one.status]
        made.add_row(f"[{style}]{one.status}[/]", one.name, redacted(str(one)).replace("[", "\\["))
    return made


def summary(found: Sequence[Finding]) -> str:
    """How many are at fault."""
    faults, warnings = (sum(one.status == status for one in found) for status in (FAULT, WARNING))
    return f"{len(found)} lines, {warnings} warnings, {faults} faults"
