"""The same training again, killed without warning in the middle and continued: the weights must be the same bits."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq.errors import LlmqError
from llmq.files.weight_files import weight_files
from llmq.options.section import flag
from llmq.quickstart.settings import Places, Settings, options

POLL_S = 0.05


@dataclass(frozen=True)
class Resumed:
    """Steps of the run that was killed, and SHA-256 of the weights of the uninterrupted and the continued run."""

    killed_after: int
    continued_from: int
    whole: str
    continued: str

    @property
    def same(self) -> bool:
        """Whether being killed made no difference."""
        return self.whole == self.continued


def show_resume(settings: Settings, places: Places, tell: Callable[[str], None]) -> Resumed:
    """Repeats the training of `places` in a process of its own, kills it after a checkpoint, and goes on.

    Raises LlmqError with the end of the process's output if it fails by itself.
    """
    again = places.out / "resume"
    mine = {
        "log_file": str(again / "log.jsonl"),
        "checkpoint_dir": str(again / "checkpoints"),
        "out_dir": str(again / "model"),
    }
    command = [sys.executable, "-m", "llmq.cli.train", *arguments({**options(settings, places), **mine})]
    shutil.rmtree(again, ignore_errors=True)
    again.mkdir(parents=True)
    tell("The same training in a process of its own, to be killed after a checkpoint")
    with open(again / "console.txt", "wb") as console:
        process = subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT)
        try:
            saved, reached = _wait_for_checkpoint(process, again)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        tell(f"Killed with SIGKILL after step {reached}; resuming from the checkpoint of step {saved}")
        code = subprocess.run(
            [*command, "--continue"], stdout=console, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        raise _failed(again)
    return Resumed(reached, saved, weights_hash(places.model), weights_hash(again / "model"))


def arguments(chosen: dict[str, Any]) -> list[str]:
    """Keyword arguments of `llmq.train` as flags of `llmq-train`."""
    return [flag(name) if value is True else f"{flag(name)}={value}" for name, value in chosen.items()]


def weights_hash(folder: Path) -> str:
    """SHA-256 of the weights in an exported model folder."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _wait_for_checkpoint(process: subprocess.Popen[bytes], folder: Path) -> tuple[int, int]:
    """Waits until a step was made after a checkpoint; returns the checkpoint's step and the last one."""
    while True:
        time.sleep(POLL_S)
        ended = process.poll() is not None
        saved, reached = _progress(folder / "log.jsonl")
        if saved and reached > saved:
            return saved, reached
        if ended:
            raise _failed(folder)


def _progress(log: Path) -> tuple[int, int]:
    """Steps of the newest checkpoint and of the last training record; 0 for none."""
    steps = {"checkpoint": 0, "train": 0}
    try:
        lines = log.read_bytes().split(b"\n")[:-1]  # behind the last line end is a line that is being written
    except FileNotFoundError:
        return 0, 0
    for record in map(json.loads, lines):
        if record["type"] in steps:
            steps[record["type"]] = record["step"]
    return steps["checkpoint"], steps["train"]


def _failed(folder: Path) -> LlmqError:
    output = (folder / "console.txt").read_text("utf-8", errors="replace").strip().splitlines()
    return LlmqError("\n".join(["the training ended by itself:", *output[-5:]]))
