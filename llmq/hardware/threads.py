"""Work on all cores, by threads: for what leaves Python's lock, as NumPy's loops and calls of the system do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from llmq.hardware.blas import num_cores

T = TypeVar("T")


def in_threads(function: Callable[[T], Any], items: Sequence[T], most: int = 64) -> None:
    """Calls a function of each item, in as many threads as this process has cores and `most` at most.

    The first error is raised, and of the items after it those are left out whose turn has not come.
    """
    count = min(num_cores(), len(items), most)
    if count <= 1:
        for item in items:
            function(item)
        return
    pool = ThreadPoolExecutor(count, "llmq-work")
    try:
        for _ in pool.map(function, items):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
