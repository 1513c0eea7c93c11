"""What the console scripts call: commands whose imports Ctrl-C ends without a traceback.

Importing a command takes a tenth of a second and more. Meanwhile SIGINT does what it does to other programs; from there
on `shell.run` answers it. SIGTERM and SIGUSR1, which batch systems send ahead of a time limit, end `llmq-train` with 75
from the start.
"""

import os
import signal
from functools import partial
from importlib import import_module
from types import FrameType

from llmq.errors import TERMINATED


def _start(module: str) -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    found = import_module(f"llmq.cli.{module}")
    found.shell.main(found.command() if module == "train" else found.command)


def train() -> None:
    """llmq-train."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)
    _start("train")


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(TERMINATED)  # an exception could be caught by a module that tries to import another


launch = partial(_start, "launch")
tokenize_data = partial(_start, "tokenize_data")
generate = partial(_start, "generate")
bench = partial(_start, "bench")
merge = partial(_start, "merge")
evaluate = partial(_start, "eval")
estimate = partial(_start, "estimate")
plot = partial(_start, "plot")
export_wandb = partial(_start, "export_wandb")
report = partial(_start, "report")
doctor = partial(_start, "doctor")
