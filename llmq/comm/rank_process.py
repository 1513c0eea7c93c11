"""A rank as a process of its own: `python -m llmq.comm.rank_process llmq.cli.start:train ARGUMENTS`.

Before anything is imported that starts threads, it takes the cores that it is given, and asks Linux for a signal when
its launcher is gone, so that none is left over. That is SIGUSR1, after which it ends its step and saves: Linux sends it
for each thread of the launcher, and a second SIGTERM would end the rank within its step.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from importlib import import_module

from llmq.errors import TERMINATED
from llmq.hardware.cores import read_cores

PR_SET_PDEATHSIG = 1
CORES, LAUNCHER, LAST_SIGNAL = "LLMQ_CORES", "LLMQ_LAUNCHER_PID", "LLMQ_LAST_SIGNAL"


def main() -> None:
    """Runs the function that the first argument names, with the arguments after it."""
    function = sys.argv.pop(1)
    _end_with(int(os.environ[LAUNCHER]), int(os.environ.get(LAST_SIGNAL, signal.SIGUSR1)))
    if cores := read_cores(os.environ.get(CORES, "")):
        os.sched_setaffinity(0, cores)
    module, _, name = function.partition(":")
    getattr(import_module(module), name)()


def _end_with(launcher: int, number: int) -> None:
    """The signal comes when the launcher ends; one that has ended already ends this process now.

    Where the system has no such signal (macOS), a rank ends once it misses the store that its launcher kept.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != launcher:
        sys.exit(TERMINATED)


if __name__ == "__main__":
    main()
