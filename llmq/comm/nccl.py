"""The GPUs of a run: NCCL between them, and another world for what the host has to say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np

from llmq.comm.world import World
from llmq.errors import WorldError

UINT8, INT32, FP32, BF16 = 1, 2, 7, 9  # ncclDataType_t
SUM, MAX = 0, 2  # ncclRedOp_t
DTYPES = {"int32": INT32, "float32": FP32, "bfloat16": BF16}


class NcclWorld:
    """A rank with a GPU, the current device. Its collectives go to the current stream, and into graphs.

    `host` moves what is in host memory; all ranks make their worlds at the same time. WorldError where NCCL cannot
    reach the others.
    """

    def __init__(self, host: World) -> None:
        import cupy
        from cupy.cuda import nccl

        self.rank, self.size, self._host, self._nccl = host.rank, host.size, host, nccl
        unique = host.gather(list(nccl.get_unique_id()) if host.rank == 0 else None)[0]
        try:
            self._communicator = nccl.NcclCommunicator(self.size, bytes(unique), self.rank)
        except nccl.NcclError as error:
            raise WorldError(
                f"NCCL cannot join the {self.size} GPUs of this run on rank {self.rank}: {error}"
            ) from error
        self._memory = cupy.cuda.alloc_pinned_memory(16)
        self._captured: WeakSet[Any] = WeakSet()
        self._counts = np.frombuffer(self._memory, np.int64, 2)
        self._counts[:] = 0

    def exchange(self, outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray]) -> None:
        """Arrays of the host."""
        self._host.exchange(outgoing, incoming)

    def gather(self, message: Any) -> list[Any]:
        """Messages of the host."""
        return self._host.gather(message)

    @property
    def store(self) -> Any:
        """Where the ranks met, which the watchdog asks; None where MPI brought them together."""
        return getattr(self._host, "store", None)

    @property
    def counts(self) -> tuple[int, int]:
        """Addresses of the numbers of collectives that the GPU has begun and ended, which it advances itself."""
        return self._memory.ptr, self._memory.ptr + 8

    def progress(self) -> tuple[str, int]:
        """What this rank waits for, on the GPU or the host, and the number of collectives that it has begun."""
        begun, ended = map(int, self._counts)
        what, count = self._host.progress() if hasattr(self._host, "progress") else ("", 0)
        return "NCCL" if begun > ended else what, begun + count

    def captured(self, program: Any) -> None:
        """Collectives are in a graph of `program`, which has to `forget` it before the GPUs part."""
        self._captured.add(program)

    def close(self) -> None:
        """The GPUs part; what is under way ends. NCCL waits for ever while there is a graph with a collective."""
        for program in list(self._captured):
            program.forget()
        self._communicator.abort()
        self._host.close()

    @contextmanager
    def group(self) -> Iterator[None]:
        """Collectives within are one, as far as NCCL is concerned."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    # device addresses

    def broadcast(self, source: int, target: int, num_bytes: int, root: int) -> None:
        """`target` of every rank <- `source` of `root`."""
        self._communicator.broadcast(source, target, num_bytes, UINT8, root, _stream())

    def reduce(self, at: int, count: int, dtype: np.dtype, root: int) -> None:
        """`at` of `root` <- the sum over ranks of `at`."""
        self._communicator.reduce(at, at, count, DTYPES[dtype.name], SUM, root, _stream())

    def all_reduce(self, source: int, target: int, count: int, dtype: np.dtype, *, largest: bool) -> None:
        """`target` <- the sum, or the largest, of `source` over ranks."""
        kind = DTYPES[dtype.name]
        self._communicator.allReduce(source, target, count, kind, MAX if largest else SUM, _stream())

    def send(self, source: int, num_bytes: int, to: int) -> None:
        """What another rank receives in the same group."""
        self._communicator.send(source, num_bytes, UINT8, to, _stream())

    def receive(self, target: int, num_bytes: int, source: int) -> None:
        """What another rank sends in the same group."""
        self._communicator.recv(target, num_bytes, UINT8, source, _stream())


def _stream() -> int:
    import cupy

    return int(cupy.cuda.get_current_stream().ptr)
