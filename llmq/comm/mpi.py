"""A world of processes that MPI has started, on mpi4py: for runs on the CPU over one machine or several.

Only buffers are sent, never pickled objects. A process of MPI that ends well has to finalize it, together with all
others; one that fails must not, or it would wait for others that wait for it. It just ends, and mpirun ends the rest.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmq.errors import UsageError, WorldError

PIECE_BYTES = 1 << 30  # of one message: MPI counts in 32 bits
TAG = 17

_failed = False  # whether this process must end without finalizing MPI


class MpiWorld:
    """This process among those that mpirun, or what stands for it, has started.

    UsageError if mpi4py or an MPI library is not installed. WorldError where MPI reports an error; most MPIs end all
    processes when one is lost.
    """

    def __init__(self) -> None:
        self._mpi = _loaded()
        self._comm = self._mpi.COMM_WORLD.Dup()
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self._problem: str | None = None

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray]) -> None:
        """Sends to and receives from all others at once, in pieces of at most 1 GiB."""
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._checked(lambda: self._send_and_receive(others, outgoing, incoming))
        incoming[self.rank][...] = outgoing[self.rank]

    def gather(self, message: Any) -> list[Any]:
        """First the lengths, then the messages as JSON."""
        mine = np.frombuffer(json.dumps(message, separators=(",", ":")).encode(), np.uint8)
        lengths = np.zeros(self.size, np.int64)
        self._checked(lambda: self._comm.Allgather(np.array([mine.size]), lengths))
        found = np.empty(int(lengths.sum()), np.uint8)
        ends = np.cumsum(lengths)
        places = [found, lengths.tolist(), (ends - lengths).tolist(), self._mpi.BYTE]
        self._checked(lambda: self._comm.Allgatherv([mine, self._mpi.BYTE], places))
        return [json.loads(text.tobytes()) for text in np.split(found, ends[:-1])]

    def close(self) -> None:
        """Ends this world. Called while an exception is on its way, the process will end without finalizing MPI."""
        if self._problem is None and sys.exc_info()[0] is not None:
            self._fail("this rank has failed")
        if self._problem is None:
            self._problem = "this rank has left the run"
            self._comm.Free()

    def _send_and_receive(
        self, others: list[int], outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray]
    ) -> None:
        requests = []
        for rank in others:
            requests += [self._comm.Irecv([p, self._mpi.BYTE], rank, TAG) for p in _pieces(incoming[rank])]
        for rank in others:
            requests += [self._comm.Isend([p, self._mpi.BYTE], rank, TAG) for p in _pieces(outgoing[rank])]
        self._mpi.Request.Waitall(requests)

    def _checked(self, call: Any) -> None:
        """Calls MPI. WorldError if it fails, and from then on."""
        if self._problem is not None:
            raise WorldError(self._problem)
        try:
            call()
        except self._mpi.Exception as error:
            self._fail(f"MPI reports to rank {self.rank} that {error.Get_error_string()}")
            raise WorldError(self._problem) from error
        except BaseException:  # half of an array may be on its way
            self._fail("an exchange with the other ranks was interrupted")
            raise

    def _fail(self, problem: str) -> None:
        global _failed
        _failed = True
        self._problem = problem


def _loaded() -> Any:
    """mpi4py's MPI, initialised, to be finalized at the end of the process unless that has failed."""
    if "mpi4py.MPI" not in sys.modules:
        try:
            import mpi4py

            mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no MPI library
            text = f"this run was started by MPI, which needs mpi4py and an MPI library ({error})"
            advice = "pip install 'llmq-train[mpi]', and openmpi or mpich where the machine has none of its own"
            raise UsageError(f"{text}: {advice}") from error
        atexit.register(_finalize, MPI)
    from mpi4py import MPI

    return MPI


def _finalize(mpi: Any) -> None:
    if not _failed and not mpi.Is_finalized():
        mpi.Finalize()


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    """An array's own memory, as bytes, in parts that MPI can count. An array of no bytes is not sent."""
    assert array.flags.c_contiguous, "a world moves contiguous arrays"
    whole = array.reshape(-1).view(np.uint8)
    return [whole[start : start + PIECE_BYTES] for start in range(0, whole.size, PIECE_BYTES)]
