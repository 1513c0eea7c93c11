"""Whole runs of several processes that lose a rank, are asked to end or to save: what is left, and how they go on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import launched_flags, weights_of

from llmq.errors import WorldError
from llmq.files.manifest import found

pytestmark = pytest.mark.sweep
ROOT = Path(__file__).parents[2]
STEPS, EVERY = 160, 20
WATCHDOG_S = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder in which a run of three ranks was never stopped; it has the flags of all runs, but for their names."""
    path = tmp_path_factory.mktemp("runs")
    before = Path.cwd()
    os.chdir(path)
    changes = {"steps": STEPS, "ckpt_interval": EVERY, "ckpt_keep_n": 0, "global_batch_size": 12}
    flags = [one for one in launched_flags(path, deterministic=True, **changes) if not one.startswith("--name=")]
    try:
        with Launched("whole", flags) as run:
            assert run.wait() == 0
        yield flags
    finally:
        os.chdir(before)


class Launched:
    """A run of several processes, as `llmq-launch` starts it in the current folder."""

    def __init__(self, name, flags, *more):
        own = {"PYTHONPATH": str(ROOT), "LLMQ_CACHE_DIR": str(Path("cache").absolute()), "OPENBLAS_NUM_THREADS": "1"}
        own["LLMQ_WATCHDOG_SECONDS"] = str(WATCHDOG_S)
        command = [sys.executable, "-m", "llmq.cli.launch", "--procs=3", "--", *flags, f"--name={name}", *more]
        self.folder = Path("runs", name)
        with open(f"{name}.txt", "ab") as output:
            self.launcher = subprocess.Popen(
                command, env={**os.environ, **own}, stdout=output, stderr=subprocess.STDOUT
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.launcher.kill()
        self.launcher.wait()

    def wait(self, timeout=120):
        """The exit code, once no process of the run is left."""
        code = self.launcher.wait(timeout)
        assert not self.ranks(), "a rank outlives its launcher"
        return code

    def ranks(self):
        """Process ids by rank."""
        ids = {}
        for process in Path("/proc").iterdir():
            try:
                text = (process / "environ").read_text() if process.name.isdigit() else ""
            except OSError:
                continue
            variables = dict(one.partition("=")[::2] for one in text.split("\0"))
            if variables.get("LLMQ_LAUNCHER_PID") == str(self.launcher.pid):
                ids[int(variables["RANK"])] = int(process.name)
        return ids

    def reaches(self, step):
        """Waits for the checkpoint of a step."""
        until = time.monotonic() + 120
        while step not in found(self.folder / "checkpoints"):
            assert self.launcher.poll() is None and time.monotonic() < until
            time.sleep(0.01)

    @property
    def said(self):
        """All that its ranks print, and its launcher."""
        return Path(f"{self.folder.name}.txt").read_text() + "".join(
            path.read_text() for path in sorted(self.folder.glob("rank-*.log"))
        )


def weights(name, step=STEPS):
    return weights_of(Path("runs", name, "checkpoints", f"step-{step:08d}"))


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_all_end_when_a_rank_is_lost_and_the_run_resumes(whole, rank, number):
    name = f"lost{rank}"
    with Launched(name, whole) as run:
        run.reaches(2 * EVERY)
        os.kill(run.ranks()[rank], number)
        began = time.monotonic()
        assert run.wait() == WorldError.exit_code
        assert time.monotonic() - began < WATCHDOG_S + 30
    for other in {0, 1, 2} - {rank}:
        stacks = run.folder / f"rank-{other:05}-stacks.txt"
        (line,) = (
            line for line in run.said.splitlines() if line.startswith(f"rank {other} ends, because rank {rank} is")
        )
        assert "(last seen in step " in line and line.endswith(f". Python stacks are in {stacks}")
        assert f"Python stacks of rank {other}:\nthread MainThread:\n" in stacks.read_text()
    assert "thread MainThread:" not in run.said
    assert f"rank {rank} was ended by SIGKILL" in run.said
    if rank:
        (end,) = (one for one in map(json.loads, (run.folder / "log.jsonl").open()) if one["type"] == "end")
        assert end["reason"] == "failed" and f"rank {rank} is lost: no sign of life" in end["error"]
    saved = found(run.folder / "checkpoints")
    assert {EVERY, 2 * EVERY} <= set(saved) and max(saved) < STEPS
    for step in saved:
        assert weights(name, step) == weights("whole", step)
    with Launched(name, whole, "--continue=auto") as again:
        assert again.wait() == 0
    assert weights(name) == weights("whole")


def test_a_run_that_lost_a_rank_starts_again(whole):
    with Launched("again", whole, "--restart-failed=1") as run:
        run.reaches(2 * EVERY)
        os.kill(run.ranks()[2], signal.SIGKILL)
        assert run.wait() == 0
    assert "starting again from the last checkpoint (start 2 of 2)" in run.said and "Continued from" in run.said
    assert run.said.count("[Options]") == run.said.count("[Allocator State]") == 1
    assert weights("again") == weights("whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_all_save_and_end_when_the_launcher_is_asked_to(whole, number):
    name = number.name.lower()
    with Launched(name, whole) as run:
        run.reaches(EVERY)
        run.launcher.send_signal(number)
        assert run.wait() == 75
    last = max(found(run.folder / "checkpoints"))
    assert (
        EVERY < last < STEPS and f"Stopped after step {last}. Resume with:\n  llmq-launch --procs=3 -- --" in run.said
    )
    with Launched(name, whole, "--continue=auto") as again:
        assert again.wait() == 0
    assert weights(name) == weights("whole")
