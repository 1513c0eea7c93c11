"""Processes that mpirun starts: where they meet, and that all of them end when one fails."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny_runs import ANYWHERE

from llmq.comm import mpi
from llmq.errors import UsageError

ROOT = Path(__file__).parents[2]


def mpirun(size, code):
    """Runs `code` on each rank: exit code, stdout, stderr."""
    command = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert command, "tools/test.sh --judges installs an MPI"
    done = subprocess.run(
        [command, "-n", str(size), sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **ANYWHERE, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


WORLD = """
    import os, sys
    from llmq.comm.environment import recognised
    from llmq.comm.join import join_world
    from llmq.hardware.device import CPU
    world = join_world(recognised(os.environ), CPU)
"""


@pytest.mark.judge
@pytest.mark.parametrize("size", [2, 4])
def test_all_hear_what_the_first_rank_says(size):
    code = f"""{WORLD}
    assert world.membership.places[0][0] == "127.0.0.1", "all are on this machine"
    assert world.gather(world.rank) == list(range({size}))
    world.close()
    print("all is here", flush=True)
    """
    assert mpirun(size, code) == (0, "all is here\n" * size, "")


@pytest.mark.judge
def test_a_rank_that_fails_ends_all_with_its_exit_code():
    """The other one waits for it, and would for ever."""
    code = f"""{WORLD}
    import time
    world.gather(1)
    if world.rank == 1:
        print("rank 1 fails", file=sys.stderr, flush=True)
        sys.exit(3)
    time.sleep(1000)
    """
    status, _, error = mpirun(2, code)
    assert status == 3 and "rank 1 fails" in error


def test_without_mpi4py_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError, match=r"pip install 'llmq-train\[mpi\]'"):
        mpi.of_first_rank([])
