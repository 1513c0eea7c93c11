"""Training by each launcher's variables: the losses of ranks that are threads here, near those of one rank."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from in_process import train_on
from tiny_runs import ANYWHERE, launched_flags

from llmq.cli.train import options_of
from llmq.comm.launch import free_port
from llmq.report.read import read_log

ROOT = Path(__file__).parents[2]
STEPS = 5
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


def arguments(tmp_path, name):
    """Flags of a run of five steps with eight rows each."""
    (tmp_path / name).mkdir()
    return launched_flags(tmp_path / name, steps=STEPS, name=name)


def by_torchrun(rank, port):
    """What torchrun sets."""
    own = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    return {**own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def by_srun(rank, port):
    """What srun sets, on two nodes that are this one."""
    own = {"SLURM_PROCID": rank, "SLURM_LOCALID": 0, "SLURM_NODEID": rank, "SLURM_STEP_NODELIST": "n[1-2]"}
    return {**SLURM, **own, "LLMQ_MASTER_ADDR": "127.0.0.1", "LLMQ_MASTER_PORT": port}


def losses(tmp_path, name):
    """Of the steps of a run, which are all there once."""
    table = read_log(tmp_path / "runs" / name).train
    assert table["step"].tolist() == list(range(1, STEPS + 1))
    return table["loss"]


def losses_here(tmp_path, num):
    """Of the same run by ranks of this process."""
    train_on(num, options_of(arguments(tmp_path, f"on{num}")).to_flat())
    return losses(tmp_path, f"on{num}")


@pytest.fixture
def environ(tmp_path, monkeypatch):
    """Variables of a run in an empty folder, of one thread for each rank."""
    monkeypatch.chdir(tmp_path)
    own = {"PYTHONPATH": str(ROOT), "LLMQ_CACHE_DIR": str(tmp_path / "cache"), "OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, **own}


@pytest.mark.judge
@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_mpirun_trains_the_same(tmp_path, environ, num):
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    by_mpi = [mpirun, "-n", str(num), sys.executable, "-m", "llmq", *arguments(tmp_path, "by_mpi")]
    subprocess.run(by_mpi, env={**environ, **ANYWHERE}, check=True, timeout=200)
    assert np.array_equal(losses(tmp_path, "by_mpi"), losses_here(tmp_path, num))


@pytest.mark.slow
def test_every_launcher_trains_the_same(tmp_path, environ):
    for kind in (by_torchrun, by_srun):
        port = str(free_port())
        command = [sys.executable, "-m", "llmq", *arguments(tmp_path, kind.__name__)]
        variables = [{key: str(value) for key, value in kind(rank, port).items()} for rank in range(2)]
        ranks = [subprocess.Popen(command, env={**environ, **own}) for own in variables]
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    launcher = [sys.executable, "-m", "llmq.cli.launch", "--procs=2", "--"]
    subprocess.run([*launcher, *arguments(tmp_path, "launched")], env=environ, check=True)
    here = losses_here(tmp_path, 2)
    assert all(np.array_equal(here, losses(tmp_path, name)) for name in ("by_torchrun", "by_srun", "launched"))
    np.testing.assert_allclose(here, losses_here(tmp_path, 1), rtol=1e-5)  # sums of f32 in another order
