"""Processes that mpirun starts: what they exchange, and that all of them end when one fails."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from llmq.comm import mpi
from llmq.errors import UsageError

ROOT = Path(__file__).parents[2]
ANYWHERE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


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


@pytest.mark.judge
@pytest.mark.parametrize("size", [2, 4])
def test_an_exchange_brings_each_rank_what_the_others_have_for_it(size):
    """Different sizes in every direction, none among them, in pieces of 3000 bytes; bf16; then messages."""
    code = """
        import ml_dtypes, numpy as np
        from llmq.comm import mpi
        mpi.PIECE_BYTES = 3000
        world = mpi.MpiWorld()
        me, size = world.rank, world.size
        for turn in range(10):
            sizes = lambda sender, receiver: (3 * sender + 5 * receiver + turn) % 4 * 1000
            drawn = lambda s, r: np.random.default_rng([turn, s, r]).random(sizes(s, r))
            everyones = [[drawn(sender, rank) for rank in range(size)] for sender in range(size)]
            incoming = [np.full(sizes(rank, me), np.nan) for rank in range(size)]
            world.exchange(everyones[me], incoming)
            for rank in range(size):
                np.testing.assert_array_equal(incoming[rank], everyones[rank][me])
        incoming = [np.zeros((2, 3), ml_dtypes.bfloat16) for _ in range(size)]
        world.exchange([np.full((2, 3), me, ml_dtypes.bfloat16)] * size, incoming)
        assert [float(array[1, 2]) for array in incoming] == list(range(size))
        text = "\\u00e9" * 1000
        assert world.gather({"rank": me, "text": text * me}) == [{"rank": r, "text": text * r} for r in range(size)]
        world.close()
        print("all is here", flush=True)
    """
    assert mpirun(size, code) == (0, "all is here\n" * size, "")


@pytest.mark.judge
def test_arrays_larger_than_every_buffer_pass_each_other():
    code = """
        import numpy as np
        from llmq.comm.mpi import MpiWorld
        world = MpiWorld()
        incoming = [np.zeros(5_000_000, np.float32) for _ in range(2)]
        world.exchange([np.full(5_000_000, world.rank, np.float32)] * 2, incoming)
        assert [(array.min(), array.max()) for array in incoming] == [(0, 0), (1, 1)]
        world.close()
    """
    assert mpirun(2, code) == (0, "", "")


@pytest.mark.judge
def test_a_rank_that_fails_ends_all_with_its_exit_code():
    """The other one waits for it, and would for ever."""
    code = """
        import sys
        from llmq.comm.mpi import MpiWorld
        world = MpiWorld()
        try:
            world.gather(1)
            if world.rank == 1:
                raise ValueError("rank 1 fails")
            world.gather(2)
        except ValueError as error:
            print(error, file=sys.stderr, flush=True)
            sys.exit(3)
        finally:
            world.close()
    """
    status, _, error = mpirun(2, code)
    assert status == 3 and "rank 1 fails" in error


@pytest.mark.judge
def test_ranks_without_a_world_of_their_own_end_well():
    """Those that meet through MPI, and then talk otherwise: two worlds, neither closed."""
    code = """
        from llmq.comm.mpi import MpiWorld
        print(MpiWorld().gather(1), MpiWorld().gather("x"), flush=True)
    """
    assert mpirun(2, code) == (0, "[1, 1] ['x', 'x']\n" * 2, "")


def test_an_array_is_sent_in_pieces_of_its_own_memory(monkeypatch):
    monkeypatch.setattr(mpi, "PIECE_BYTES", 10)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    pieces = mpi._pieces(array)
    assert [piece.size for piece in pieces] == [10, 10, 4] and all(np.shares_memory(p, array) for p in pieces)
    assert mpi._pieces(np.zeros(0)) == []


def test_without_mpi4py_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'llmq-train\[mpi\]'"):
        mpi.MpiWorld()
