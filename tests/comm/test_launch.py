"""Processes as ranks, here and in a Ray cluster: they meet, hear each signal once, and none stays when one is lost.

A stand-in does the work.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ray_actors import keepers

from llmq.comm import launch
from llmq.comm.environment import Place
from llmq.comm.launch import Group, run_group, run_ray_group
from llmq.errors import TERMINATED, UsageError, WorldError

HERE = Path(__file__).parent
LOST = WorldError.exit_code
RAY = [pytest.mark.judge, pytest.mark.sweep]


@pytest.fixture(scope="module")
def cluster():
    """The address of a Ray cluster of two machines with one core each, which are two of its node processes here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HERE}:{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        made.add_node(num_cpus=1)
        yield made.address
        made.shutdown()


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """A function that runs the stand-in on some ranks, and returns its exit code and what was shown."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{HERE.parents[1]}")

    def run(num, *arguments, restarts=0, cores=(), cluster=None):
        first = Place(0, num, 0, num, "127.0.0.1", 0, "token", "ray" if cluster else "--gpus")
        group = Group(("stand_in:main", *arguments), first, tmp_path / "logs", cores)
        code = run_ray_group(group, cluster, restarts, on_gpus=False) if cluster else run_group(group, restarts)
        said = capfd.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture(params=["here", pytest.param("ray", marks=RAY)])
def address(request):
    """None for this machine, and the address of the cluster."""
    return None if request.param == "here" else request.getfixturevalue("cluster")


def test_ranks_meet(run, address, tmp_path):
    core = max(os.sched_getaffinity(0))
    code, said = run(2, "exchange", cores=[frozenset([core]), frozenset()], cluster=address)
    assert not code and "the sum over 2 ranks is 12330" in said, said
    assert address or f"rank 0 on cores [{core}]" in said
    where = "1 on this machine, started by ray" if address else "2 on this machine, started by --gpus"
    assert f"Ranks: 2, {where}" in said and not (address and keepers())
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank-00001.log"]


def test_the_code_is_that_of_the_rank_that_failed_by_itself(run, address):
    code, said = run(2, "fail", "1", "3", restarts=1, cluster=address)
    assert code == 3 and "rank 1 ended with exit code 3; the end of " in said
    assert "  error: rank 1 cannot" in said and "rank 1 is lost" in said  # which is what rank 0 says


@pytest.mark.judge
@pytest.mark.sweep
@pytest.mark.parametrize("restarts", [0, 1])
def test_an_actor_that_is_killed(run, cluster, tmp_path, restarts):
    def kill_one():
        until = time.monotonic() + 60
        while not (tmp_path / "waiting").exists() and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(keepers()[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    code, said = run(2, "wait-once", str(tmp_path), restarts=restarts, cluster=cluster)
    killer.join()
    assert code == (0 if restarts else LOST) and "was ended by SIGKILL" in said
    assert ("(start 2 of 2)" in said and "the sum over 2 ranks is 12330" in said) == (restarts == 1), said


@pytest.mark.judge
@pytest.mark.sweep
def test_clusters_that_are_too_small_or_not_there(run, cluster):
    with pytest.raises(UsageError, match="3 CPUs are asked for, and the Ray cluster has 2"):
        run(3, "exchange", cluster=cluster)
    with pytest.raises(UsageError, match="no Ray cluster answers there"):
        run(2, "exchange", cluster="127.0.0.1:1")


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed(run, rank):
    """Where that is rank 0, the launcher shows what another says of it."""
    code, said = run(2, "fail", str(rank), "-9")
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
    assert said.count("error: rank 0 cannot") == 1 and "ended with" not in said  # what rank 0 says is not repeated


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


@pytest.mark.slow
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
