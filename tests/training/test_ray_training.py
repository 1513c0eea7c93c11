"""A run on a Ray cluster of two nodes: one of its actors is killed, and the run resumes and ends."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from ray_actors import keepers
from tiny_runs import launched_flags

from llmq.report.read import read_log

pytestmark = [pytest.mark.judge, pytest.mark.sweep]
ROOT = Path(__file__).parents[2]
STEPS = 600


@pytest.mark.parametrize("num", [1, 2])
def test_a_run_resumes_when_an_actor_is_killed(num, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    from llmq.cli import launch, shell

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    flags = launched_flags(tmp_path, steps=STEPS, ckpt_interval=20, launcher="ray", ray_address=cluster.address)

    def kill():
        until = time.monotonic() + 60
        while not list(tmp_path.glob("runs/run/checkpoints/step-*")) and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(keepers()[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        assert shell.run(launch.command, [f"--procs={num}", "--", *flags]) == 0
    finally:
        killer.join()
        cluster.shutdown()
    said = capfd.readouterr()
    assert "starting again from the last checkpoint (start 2 of 4)" in said.err and "Continued from" in said.out
    assert read_log(tmp_path / "runs/run").train["step"].tolist()[-1] == STEPS
