"""How many bytes an installation of llmq takes: its distributions and all that they need, as pip recorded them."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import llmq

ROOTS = ("llmq-train", "matplotlib")  # matplotlib draws the quickstart's plot


def needed() -> dict[str, Distribution]:
    """The installed distributions that ROOTS need, by name; empty if llmq itself is not installed."""
    found: dict[str, Distribution] = {}
    todo = list(ROOTS)
    while todo:
        name = todo.pop()
        try:
            one = distribution(name)
        except PackageNotFoundError:
            if name == ROOTS[0]:
                return {}
            continue  # for another platform or Python, or an extra that was not asked for
        if _plain(name) not in found:
            found[_plain(name)] = one
            todo += [re.split(r"[^\w.-]", need, maxsplit=1)[0] for need in one.requires or () if "extra ==" not in need]
    return found


def installed_bytes() -> int | None:
    """Bytes of llmq and everything that it needs, without compiled caches; None if it is not installed."""
    distributions = needed()
    if not distributions:
        return None
    files = {Path(str(file.locate())) for one in distributions.values() for file in one.files or ()}
    files |= set(Path(llmq.__file__).parent.rglob("*"))  # an editable installation records a link only
    return sum(path.stat().st_size for path in files if path.is_file() and path.suffix != ".pyc")


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
