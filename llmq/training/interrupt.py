"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1: the first asks training to end after its step; elsewhere it ends at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from llmq.errors import INTERRUPTED, TERMINATED

EXIT_CODES = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: TERMINATED,
    signal.SIGHUP: TERMINATED,
    signal.SIGUSR1: TERMINATED,  # what a batch system sends ahead of a job's time limit
}
SIGNALS = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}  # by what handlers raise
AGAIN_S = 0.02  # after which Python is elsewhere
Handler = Callable[[int, FrameType | None], None]
HEARD = "\nEnding after this step. A second Ctrl-C ends at once, without the steps since the last checkpoint.\n"


class Interrupt:
    """While entered, the signals set `exit_code` instead of ending the process; then all is as before."""

    def __init__(self) -> None:
        self.exit_code = 0
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.exit_code != 0

    def __enter__(self) -> Interrupt:
        self._before = _handled(EXIT_CODES, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.exit_code = EXIT_CODES[signal.Signals(number)]
        if number != signal.SIGUSR1:  # which comes more than once, or ahead of SIGTERM
            _restore(self._before)  # the second signal does what it did before
        if number == signal.SIGINT:
            with suppress(OSError, ValueError):  # print() could be the very thing that was interrupted
                os.write(sys.stderr.fileno(), HEARD.encode())


@contextmanager
def terminable() -> Iterator[None]:
    """Lets SIGTERM and SIGUSR1 end the command as Ctrl-C does; writers on the way remove what cannot be resumed.

    What a handler raises while Python frees an object goes nowhere: that signal is sent once more.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    def lost(what: sys.UnraisableHookArgs) -> None:
        number = SIGNALS.get(what.exc_type)
        if number is None:
            hook(what)
            return
        again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    before, hook = _handled((signal.SIGTERM, signal.SIGUSR1), terminate), sys.unraisablehook
    sys.unraisablehook = lost
    try:
        yield
    finally:
        sys.unraisablehook = hook
        _restore(before)


def _handled(numbers: Iterable[int], handler: Handler) -> dict[int, Any]:
    """Makes a handler that of these signals; their handlers before.

    A signal that is ignored (SIGHUP under nohup) stays so. Only the main thread may handle signals: in another one (a
    notebook's worker), this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def _restore(before: dict[int, Any]) -> None:
    while before:
        signal.signal(*before.popitem())
