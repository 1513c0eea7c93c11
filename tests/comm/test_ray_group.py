"""Ranks as actors of a Ray cluster of two machines, which are two of its node processes here."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from ray_actors import keepers

from llmq.comm.environment import Place
from llmq.comm.launch import Group
from llmq.comm.ray_group import run_ray_group
from llmq.errors import UsageError, WorldError

pytestmark = [pytest.mark.judge, pytest.mark.sweep]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def cluster():
    """The address of two nodes with one core each, on which the tests can be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{HERE}:{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        made.add_node(num_cpus=1)
        yield made.address
        made.shutdown()


@pytest.fixture
def run(cluster, tmp_path, capfd):
    """A function that runs the stand-in on two actors, and returns its exit code and what was shown."""

    def run(*arguments, restarts=0, num=2):
        group = Group(("stand_in:main", *arguments), Place(0, num, 0, num, "", 0, "token", "ray"), tmp_path / "logs")
        code = run_ray_group(group, cluster, restarts, on_gpus=False)
        said = capfd.readouterr()
        return code, said.out + said.err

    return run


def kill_one_after(mark):
    """Kills an actor once the file is there; gives up after a minute."""
    until = time.monotonic() + 60
    while not mark.exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(keepers()[0], signal.SIGKILL)


def test_the_ranks_of_two_machines_meet(run, tmp_path):
    code, said = run("exchange")
    assert not code and "the sum over 2 ranks is 12330" in said, said
    assert "Ranks: 2, 1 on this machine, started by ray" in said
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank-00001.log"]
    assert not keepers()


def test_the_code_is_that_of_the_rank_that_failed_by_itself(run):
    code, said = run("fail", "1", "3", restarts=1)
    assert code == 3 and "rank 1 ended with exit code 3" in said and "  error: rank 1 cannot" in said


def test_a_group_starts_again_when_an_actor_is_killed(run, tmp_path):
    killer = threading.Thread(target=kill_one_after, args=(tmp_path / "waiting",))
    killer.start()
    code, said = run("wait-once", str(tmp_path), restarts=1)
    killer.join()
    assert not code and "was ended by SIGKILL" in said and "(start 2 of 2)" in said, said
    assert "the sum over 2 ranks is 12330" in said


def test_a_killed_actor_without_another_start(run, tmp_path):
    killer = threading.Thread(target=kill_one_after, args=(tmp_path / "waiting",))
    killer.start()
    assert run("wait-once", str(tmp_path))[0] == WorldError.exit_code
    killer.join()


def test_a_cluster_that_is_too_small(run):
    with pytest.raises(UsageError, match="3 CPUs are asked for, and the Ray cluster has 2"):
        run("exchange", num=3)


def test_a_cluster_that_is_not_there(tmp_path):
    group = Group(("stand_in:main", "exchange"), Place(0, 2, 0, 2, "", 0, "token", "ray"), tmp_path)
    with pytest.raises(UsageError, match="no Ray cluster answers there"):
        run_ray_group(group, "127.0.0.1:1", 0, on_gpus=False)
