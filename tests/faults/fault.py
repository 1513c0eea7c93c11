"""One fault: what it is, and how it is planted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in `file`; paths are relative to the repository's root."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def planted(source: str, fault: Fault) -> str:
    """`source` with the fault; ValueError unless the text to replace is there exactly once."""
    if (count := source.count(fault.old)) != 1:
        raise ValueError(f"fault {fault.name}: {fault.old!r} is {count} times in {fault.file}, not once")
    return source.replace(fault.old, fault.new)
