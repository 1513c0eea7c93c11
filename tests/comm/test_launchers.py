"""torchrun, mpirun and srun themselves, each starting a stand-in; the last where a Slurm cluster runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import ANYWHERE

HERE = Path(__file__).parent
RUN = "import stand_in; stand_in.run()"
SUMS = {2: 12330, 4: 51960}  # of what the ranks exchange


@pytest.fixture
def environ(tmp_path):
    """Variables with which the stand-in is found, and has a cache folder of its own."""
    own = {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "STAND_IN": "exchange", "LLMQ_CACHE_DIR": str(tmp_path)}
    return {**os.environ, **ANYWHERE, **own}


def found(program):
    """A program beside this Python, or on the path."""
    return shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def output(command, environ):
    """What the ranks print; the launcher ends well."""
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.mark.judge
@pytest.mark.parametrize("flags", [["--standalone"], ["--master-port=29471"]], ids=["standalone", "port"])
def test_torchrun(environ, tmp_path, flags):
    script = tmp_path / "script.py"
    script.write_text(RUN)
    said = output([found("torchrun"), "--nproc-per-node=2", *flags, str(script)], environ)
    assert "Ranks: 2, 2 on this machine, started by torchrun" in said and f"the sum over 2 ranks is {SUMS[2]}" in said


@pytest.mark.judge
def test_torchrun_on_two_machines(environ, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RUN)
    flags = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=localhost", "--master-port=29473"]
    nodes = [
        subprocess.Popen(
            [found("torchrun"), *flags, f"--node-rank={node}", script], env=environ, stdout=subprocess.PIPE, text=True
        )
        for node in (0, 1)
    ]
    said = [node.communicate(timeout=120)[0] for node in nodes]
    assert "Ranks: 2, 1 on this machine" in said[0] and f"the sum over 2 ranks is {SUMS[2]}" in said[0]
    assert [node.returncode for node in nodes] == [0, 0]


@pytest.mark.judge
@pytest.mark.parametrize("num", [2, 4])
def test_mpirun(environ, num):
    said = output([found("mpirun"), "-n", str(num), sys.executable, "-c", RUN], environ)
    assert f"Ranks: {num}, {num} on this machine, started by " in said and "MPI" in said
    assert f"the sum over {num} ranks is {SUMS[num]}" in said


@pytest.mark.judge
def test_a_rank_that_fails_ends_all_with_its_exit_code(environ):
    """The other one waits for it, and would for ever."""
    code = (
        "import os, sys, time\n"
        "from llmq.comm.environment import recognised\n"
        "from llmq.comm.world import join_world\n"
        "from llmq.hardware.device import CPU\n"
        "world = join_world(recognised(os.environ), CPU)\n"
        "assert world.gather(world.rank) == [0, 1]\n"
        "if world.rank == 1: sys.exit(3)\n"
        "time.sleep(1000)"
    )
    command = [found("mpirun"), "-n", "2", sys.executable, "-c", code]
    assert subprocess.run(command, env=environ, capture_output=True, timeout=120).returncode == 3


@pytest.mark.slow
def test_srun(environ):
    if not found("srun") or subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.skip("no Slurm cluster")
    said = output(["srun", "-N2", "-n4", "--overcommit", sys.executable, "-c", RUN], environ)
    assert "Ranks: 4, 2 on this machine, started by srun" in said and f"the sum over 4 ranks is {SUMS[4]}" in said
