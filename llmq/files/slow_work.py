"""How far work on large files is, in a line now and then, once it has taken two seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from llmq.disk import shown

SLOW_S, EVERY_S = 2.0, 10.0

Say = Callable[[str], None]


class SlowWork:
    """Counts the bytes that threads have `moved`; `report` says how many, if it is time for that."""

    def __init__(self, what: str, total: int, say: Say) -> None:
        self._what, self._total, self._say = what, total, say
        self._done, self._lock = 0, threading.Lock()
        self._next = time.monotonic() + SLOW_S

    def count(self, num_bytes: int, /) -> None:
        """Counts, from any thread."""
        with self._lock:
            self._done += num_bytes

    def moved(self, num_bytes: int, /) -> None:
        """Counts, and reports from the calling thread."""
        with self._lock:
            self._done += num_bytes
            self.report()

    def report(self) -> None:
        """A line after SLOW_S seconds, and every EVERY_S seconds from then on."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            share = 100 * self._done / max(self._total, 1)
            self._say(f"{self._what}: {shown(self._done)} of {shown(self._total)} ({share:.0f}%)")
