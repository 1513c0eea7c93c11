"""Slurm's short forms: lists of nodes such as `gpu[01-03,7],login`, and tasks per node such as `8(x2),4`."""

from __future__ import annotations

import re

from llmq.errors import UsageError

_PART = re.compile(r"(?:[^,\[\]]|\[[0-9,-]+\])+")
_BRACKETS = re.compile(r"\[([0-9,-]+)\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def node_names(nodes: str) -> list[str]:
    """The names in a list of nodes, in order: `a[08-10]b,c` is a08b, a09b, a10b, c. UsageError if it is no list."""
    parts = _PART.findall(nodes)
    if not parts or ",".join(parts) != nodes:
        raise UsageError(f"{nodes!r} is not a list of nodes such as node[01-03,7],other")
    return [name for part in parts for name in _expanded(part)]


def _expanded(part: str) -> list[str]:
    """The names of one part: the first brackets spelled out, then those that follow them."""
    found = _BRACKETS.search(part)
    if found is None:
        return [part]
    before, after = part[: found.start()], part[found.end() :]
    names = []
    for item in found[1].split(","):
        first, _, last = item.partition("-")
        if not first or (last and int(last) < int(first)) or item.endswith("-"):
            raise UsageError(f"{part!r} has {item!r} in brackets, which is no range of numbers such as 01-03")
        for number in range(int(first), int(last or first) + 1):
            names += _expanded(f"{before}{number:0{len(first)}d}{after}")
    return names


def tasks_of_nodes(tasks: str) -> list[int]:
    """Tasks of each node: `8(x2),4` is 8, 8, 4. UsageError if it is no such list."""
    found = [_TASKS.fullmatch(part) for part in tasks.split(",")]
    if None in found:
        raise UsageError(f"{tasks!r} is not a list of tasks per node such as 8(x2),4")
    return [int(part[1]) for part in found if part for _ in range(int(part[2] or 1))]
