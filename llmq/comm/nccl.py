"""The GPUs of a run: NCCL or copy engines between them, and another world for what the host has to say."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Thread
from typing import Any
from weakref import WeakSet

import numpy as np

from llmq.comm.peer_copies import CudaPeer, PeerCopies, PeerError, Transfers, machine
from llmq.comm.world import NO_COPIES, Copying, World
from llmq.errors import UsageError, WorldError

UINT8, INT32, FP32, BF16 = 1, 2, 7, 9  # ncclDataType_t
SUM, MAX = 0, 2  # ncclRedOp_t
DTYPES = {"int32": INT32, "float32": FP32, "bfloat16": BF16}
LEAST_BYTES = 1 << 20  # of a gather that is copied: below, NCCL's one kernel is faster than two meetings
TIMED_BYTES = 128 << 20  # that all ranks have together, as the weights of a layer, where copies and NCCL are timed
TIMED_PIECES = 4  # of each rank, as the matrices of a layer
TIMES = 5

Work = Callable[["NcclWorld", int, int, dict[str, Any]], None]


@dataclass
class _Group:
    """Calls of a group that are made at its end: of `broadcast`, `send` and `receive`; `reduce` is made at once."""

    broadcasts: list[tuple[int, int, int, int]] = field(default_factory=list)
    sends: list[tuple[int, int, int]] = field(default_factory=list)
    receives: list[tuple[int, int, int]] = field(default_factory=list)


class NcclWorld:
    """A rank with a GPU, the current device. Its collectives go to the current stream, and into graphs.

    `host` moves what is in host memory; all ranks make their worlds at the same time. `copying` says what copy engines
    move in the place of NCCL. WorldError where NCCL cannot reach the others, UsageError where copies cannot and are
    asked for.
    """

    def __init__(self, host: World, copying: Copying = NO_COPIES) -> None:
        import cupy
        from cupy.cuda import nccl

        self.rank, self.size, self._host, self._nccl = host.rank, host.size, host, nccl
        self.exchange, self.gather = host.exchange, host.gather  # what the host has goes its way
        self.membership = getattr(host, "membership", None)
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
        self._group: _Group | None = None
        self._copies = self._peer_copies(copying)
        self.copies = copying if self._copies else NO_COPIES
        if None in (self.copies.gathers, self.copies.exchanges):
            self.copies = fastest(self, self.copies)

    @property
    def counts(self) -> tuple[int, int]:
        """Addresses of the numbers of collectives that the GPU has begun and ended, which it advances itself."""
        return self._memory.ptr, self._memory.ptr + 8

    def progress(self) -> tuple[str, int]:
        """What this rank waits for, on the GPU or the host, and the number of collectives that it has begun."""
        begun, ended = map(int, self._counts)
        what, count = self._host.progress() if hasattr(self._host, "progress") else ("", 0)
        on_gpu = "NCCL" if self.copies == NO_COPIES else "NCCL or copies"
        return on_gpu if begun > ended else what, begun + count

    def captured(self, program: Any) -> None:
        """Collectives are in a graph of `program`, which has to `forget` it before the GPUs part."""
        self._captured.add(program)

    def close(self) -> None:
        """The GPUs part; what is under way ends. NCCL waits for ever while there is a graph with a collective, and a
        graph that runs stays while it waits for copies."""
        for program in list(self._captured):
            program.forget()
        released = Thread(target=self._copies.close if self._copies is not None else int, daemon=True)
        released.start()
        self._communicator.abort()
        released.join()
        self._host.close()

    @contextmanager
    def group(self, known: dict[str, Any] | None = None) -> Iterator[None]:
        """Collectives within are one.

        `known` keeps what the ranks have exchanged of such a group, for when it is made again with the same
        addresses: a group that goes into a graph has been made before.
        """
        if self._group is not None:
            yield
            return
        self._group = made = _Group()
        copied = Transfers(self.rank, self.size)
        self._nccl.groupStart()
        try:
            yield
            self._make(made, copied)
        finally:
            self._nccl.groupEnd()
            self._group = None
        if self._copies is not None and not copied.is_empty:
            known = {} if known is None else known
            if "copies" not in known:
                known["copies"] = self._copies.agreed(copied)
            self._copies.run(known["copies"])

    # device addresses

    def broadcast(self, source: int, target: int, num_bytes: int, root: int) -> None:
        """`target` of every rank <- `source` of `root`, at the end of the group."""
        assert self._group is not None
        self._group.broadcasts.append((source, target, num_bytes, root))

    def reduce(self, at: int, count: int, dtype: np.dtype, root: int) -> None:
        """`at` of `root` <- the sum over ranks of `at`."""
        self._communicator.reduce(at, at, count, DTYPES[dtype.name], SUM, root, _stream())

    def all_reduce(self, source: int, target: int, count: int, dtype: np.dtype, *, largest: bool) -> None:
        """`target` <- the sum, or the largest, of `source` over ranks."""
        kind = DTYPES[dtype.name]
        self._communicator.allReduce(source, target, count, kind, MAX if largest else SUM, _stream())

    def send(self, source: int, num_bytes: int, to: int) -> None:
        """What another rank receives in the same group."""
        assert self._group is not None
        self._group.sends.append((source, num_bytes, to))

    def receive(self, target: int, num_bytes: int, source: int) -> None:
        """What another rank sends in the same group."""
        assert self._group is not None
        self._group.receives.append((target, num_bytes, source))

    def _make(self, made: _Group, copied: Transfers) -> None:
        """What ranks get from each other in a group: what is not `copied` is sent by NCCL."""
        gathers = self.copies.gathers and sum(num_bytes for _, _, num_bytes, _ in made.broadcasts) >= LEAST_BYTES
        stream = _stream()
        for source, target, num_bytes, root in made.broadcasts:
            if gathers:
                copied.broadcast(source, target, num_bytes, root)
            else:
                self._communicator.broadcast(source, target, num_bytes, UINT8, root, stream)
        for source, num_bytes, to in made.sends:
            if self.copies.exchanges:
                copied.sent[to].append((source, num_bytes))
            else:
                self._communicator.send(source, num_bytes, UINT8, to, stream)
        for target, num_bytes, origin in made.receives:
            if self.copies.exchanges:
                copied.received[origin].append((target, num_bytes))
            else:
                self._communicator.recv(target, num_bytes, UINT8, origin, stream)

    def _peer_copies(self, copying: Copying) -> PeerCopies | None:
        """Copies between all ranks, if any may be wanted; None where they cannot be made, and none are asked for."""
        if copying == NO_COPIES:
            return None
        try:
            return PeerCopies(self._host, CudaPeer(), machine())
        except PeerError as error:
            if copying.demanded:
                raise UsageError(f"{' and '.join(copying.demanded)}: {error}: leave it out, for NCCL") from error
            return None


def _stream() -> int:
    import cupy

    return int(cupy.cuda.get_current_stream().ptr)


def fastest(world: NcclWorld, copying: Copying) -> Copying:
    """What copy engines move, where that is left to timing. All ranks ask."""
    works = {"gathers": _gather, "exchanges": _exchange}
    left = {name: work for name, work in works.items() if getattr(copying, name) is None}
    times = timed(world, left)
    return replace(copying, **{name: times[name, True] < times[name, False] for name in left})


def timed(world: NcclWorld, works: Mapping[str, Work]) -> dict[tuple[str, bool], float]:
    """Seconds of each work by copies (True) and by NCCL, on the slowest rank."""
    import cupy
    from cupy.cuda import runtime

    size = TIMED_BYTES // (world.size * TIMED_PIECES) // 256 * 256
    memory = int(runtime.malloc(2 * TIMED_BYTES))
    found = {}
    try:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for name, work in works.items():
                for by_copies in (False, True):
                    world.copies = Copying(by_copies, by_copies)
                    seconds = _seconds(stream, partial(work, world, memory, size))
                    found[name, by_copies] = max(world.gather(seconds))  # by then none has the memory open
    finally:
        runtime.free(memory)
    return found


def _gather(world: NcclWorld, memory: int, size: int, known: dict[str, Any]) -> None:
    """Every rank's pieces to all."""
    with world.group(known):
        for piece in range(TIMED_PIECES):
            for root in range(world.size):
                at = memory + (piece * world.size + root) * size
                world.broadcast(at, at, size, root)


def _exchange(world: NcclWorld, memory: int, size: int, known: dict[str, Any]) -> None:
    """Other pieces of every rank to each."""
    with world.group(known):
        for piece in range(TIMED_PIECES):
            for other in range(world.size):
                if other != world.rank:
                    at = memory + (piece * world.size + other) * size
                    world.send(at, size, other)
                    world.receive(at + TIMED_BYTES, size, other)


def _seconds(stream: Any, work: Callable[[dict[str, Any]], None]) -> float:
    """Of one call, the mean of a few in a graph."""
    from cupy.cuda import Event, get_elapsed_time

    known: dict[str, Any] = {}
    work(known)
    stream.begin_capture()
    for _ in range(TIMES):
        work(known)
    graph = stream.end_capture()
    start, end = Event(), Event()
    graph.launch(stream)
    start.record(stream)
    graph.launch(stream)
    end.record(stream)
    end.synchronize()
    return 1e-3 * get_elapsed_time(start, end) / TIMES
