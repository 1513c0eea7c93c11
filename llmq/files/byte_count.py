"""Counts the bytes that several threads move, for the progress of work on large files."""

from __future__ import annotations

import threading

from llmq.screen import Report


class ByteCount:
    """Counts bytes from any thread, and reports how many of `total` are done."""

    def __init__(self, total: int = 0, report: Report = lambda done, total: None) -> None:
        self._done, self._total, self._report = 0, total, report
        self._lock = threading.Lock()

    def count(self, num_bytes: int, /) -> None:
        """Counts."""
        with self._lock:
            self._done += num_bytes

    def moved(self, num_bytes: int, /) -> None:
        """Counts and reports."""
        with self._lock:
            self._done += num_bytes
            self._report(self._done, self._total)

    def report(self) -> None:
        """Reports."""
        with self._lock:
            self._report(self._done, self._total)
