"""Processes as ranks: they meet, hear each signal once, and none stays when one is lost. A stand-in does the work."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmq.comm import launch
from llmq.comm.environment import Place
from llmq.comm.launch import Group, run_group
from llmq.errors import TERMINATED, WorldError

HERE = Path(__file__).parent
LOST = WorldError.exit_code


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """A function that runs the stand-in on some ranks, and returns its exit code and what was shown."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{HERE.parents[1]}")

    def run(num, *arguments, restarts=0, cores=()):
        first = Place(0, num, 0, num, "127.0.0.1", 0, "token", "--gpus")
        code = run_group(Group(("stand_in:main", *arguments), first, tmp_path / "logs", cores), restarts)
        said = capfd.readouterr()
        return code, said.out + said.err

    return run


def test_ranks_meet(run, tmp_path):
    core = max(os.sched_getaffinity(0))
    code, said = run(3, "exchange", cores=[frozenset([core]), frozenset(), frozenset()])
    assert not code and f"rank 0 on cores [{core}]" in said, said
    assert "Ranks: 3, 3 on this machine, started by --gpus" in said
    expected = 3 * sum(100 * step + 10 * a + b for step in range(5) for a in range(3) for b in range(3))
    assert f"the sum over 3 ranks is {expected}" in said
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["rank-00001.log", "rank-00002.log"]


def test_the_code_is_that_of_the_rank_that_failed_by_itself(run):
    code, said = run(2, "fail", "1", "3")
    assert code == 3 and "rank 1 ended with exit code 3; the end of " in said
    assert "  error: rank 1 cannot" in said and "rank 1 is lost" in said  # which is what rank 0 says


@pytest.mark.slow
def test_what_rank_0_says_is_not_repeated(run):
    code, said = run(2, "fail", "0", "3")
    assert code == 3 and said.count("error: rank 0 cannot") == 1 and "ended with" not in said


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed(run, rank):
    """Where that is rank 0, the launcher shows what another says of it."""
    code, said = run(2, "kill", str(rank))
    assert code == LOST and f"rank {rank} was ended by SIGKILL" in said and f"rank {rank} is lost" in said


@pytest.mark.sweep
def test_a_rank_that_stays_is_ended(run, monkeypatch):
    monkeypatch.setattr(launch, "ENDINGS", ((0.2, signal.SIGTERM), (0.4, signal.SIGKILL)))
    start = time.monotonic()
    code, said = run(2, "stay", "1")
    assert code == 1 and time.monotonic() - start < 30
    assert "rank 1 is still there 0.2 s after another failed: SIGTERM" in said and ": SIGKILL" in said


def test_a_group_starts_again(run, tmp_path):
    code, said = run(2, "fail-once", "1", str(tmp_path), restarts=1)
    assert not code and "starting again from the last checkpoint (start 2 of 2)" in said
    assert "the sum over 2 ranks" in said


@pytest.mark.sweep
@pytest.mark.parametrize("code", [2, 3, 4, 5, 7])
def test_what_another_start_would_not_mend_ends_the_run(run, code):
    found, said = run(2, "fail", "0", str(code), restarts=3)
    assert found == code and "starting again" not in said


@pytest.fixture
def waiting(tmp_path):
    """A function that starts a launcher of two ranks that wait for a signal: its process, and the log of rank 1."""

    def start(last):
        script = (
            "import sys; from pathlib import Path;"
            "from llmq.comm.environment import Place; from llmq.comm.launch import Group, run_group;"
            "first = Place(0, 2, 0, 2, '127.0.0.1', 0, 'token', '--gpus');"
            f"sys.exit(run_group(Group(('stand_in:main', 'wait', '{last}'), first, Path(sys.argv[1]))))"
        )
        environ = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
        command = [sys.executable, "-c", script, str(tmp_path)]
        launcher = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, process_group=0)
        assert launcher.stdout
        while "rank 0 waits" not in launcher.stdout.readline():
            pass
        log = tmp_path / "rank-00001.log"
        while "rank 1 waits" not in log.read_text():
            time.sleep(0.02)
        return launcher, log

    return start


def test_each_rank_hears_each_signal_once(waiting):
    """Sent to the launcher's process group, as a terminal does."""
    launcher, log = waiting(signal.SIGTERM)
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        os.killpg(launcher.pid, number)
        time.sleep(0.1)
    said = launcher.communicate()[0]
    heard = [int(number) for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)]
    assert launcher.returncode == TERMINATED
    assert f"rank 0 heard {heard}" in said and f"rank 1 heard {heard}" in log.read_text()


@pytest.mark.sweep
def test_ranks_end_with_their_launcher(waiting):
    """Also when it is killed."""
    launcher, log = waiting(signal.SIGUSR1)
    launcher.kill()
    launcher.wait()
    until = time.monotonic() + 20
    while "rank 1 heard" not in log.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    assert "rank 0 heard" in launcher.stdout.read()
