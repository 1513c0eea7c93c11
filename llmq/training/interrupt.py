"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1: the first asks training to end after its step; elsewhere it ends at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from llmq.errors import INTERRUPTED, TERMINATED

EXIT_CODES = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: TERMINATED,
    signal.SIGHUP: TERMINATED,
    signal.SIGUSR1: TERMINATED,  # what a batch system sends ahead of a job's time limit
}
HEARD = "\nEnding after this step. A second Ctrl-C ends at once, without the steps since the last checkpoint.\n"


class Interrupt:
    """While entered, the signals set `exit_code` instead of ending the process; then all is as before.

    A signal that is ignored (SIGHUP under nohup) stays so. Only the main thread may handle signals: entered in another
    one (a notebook's worker), it does nothing.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return self.exit_code != 0

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in EXIT_CODES if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.exit_code = EXIT_CODES[signal.Signals(number)]
        if number != signal.SIGUSR1:  # which comes more than once, or ahead of SIGTERM
            self._restore()  # the second signal does what it did before
        if number == signal.SIGINT:
            with suppress(OSError, ValueError):  # print() could be the very thing that was interrupted
                os.write(sys.stderr.fileno(), HEARD.encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


@contextmanager
def terminable() -> Iterator[None]:
    """Lets SIGTERM and SIGUSR1 end the command as Ctrl-C does; writers on the way remove what cannot be resumed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [number for number in (signal.SIGTERM, signal.SIGUSR1) if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _terminate) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)
