"""Copies between the GPUs of one machine by their copy engines: what a group of collectives moves, without NCCL.

A rank writes what it sends into the memory of the rank that receives it, which CUDA's IPC handles open to other
processes. That takes no multiprocessors, which NCCL's kernels take from the matrix products beside them, and the links
are fuller. Two meetings of all ranks are around the copies of a group, on the GPUs, without the host: after the first
one nothing reads any more what is overwritten, after the last one all has arrived.

At a meeting each rank sets a word in the memory of each other rank to 1, and waits until the others have set its own,
which it then clears. No word is set twice before it was cleared: between two meetings of a kind lies one of the other
kind. So the same commands hold for every replay of a captured graph, whose values are constant. NCCL's own collectives
by copy engines meet in this way, too (its src/ce_coll.cc).
"""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmq.comm.world import World
from llmq.errors import WorldError

READY, ARRIVED = 0, 1  # the kinds of meetings
KINDS = 2
WORD = 4  # bytes of what other GPUs set
ALLOCATION = 2 << 20  # that has a handle of its own: smaller ones may be parts of one
BOOT = Path("/proc/sys/kernel/random/boot_id")
RELEASE_S = 5.0  # at most, until all that waits has gone on
Move = tuple[int, int, int]  # target, source, bytes


class PeerError(Exception):
    """Why a GPU cannot reach the memory of another one."""


@dataclass
class Transfers:
    """What a group of collectives moves to and from a rank: addresses and bytes by the other rank, in the order of the
    calls, which is the same on both sides; and copies of its own."""

    rank: int
    size: int
    sent: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    received: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    own: list[Move] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is moved."""
        return not (self.sent or self.received or self.own)

    def broadcast(self, source: int, target: int, num_bytes: int, root: int) -> None:
        """`target` of every rank <- `source` of `root`."""
        if root != self.rank:
            self.received[root].append((target, num_bytes))
            return
        for other in range(self.size):
            if other != root:
                self.sent[other].append((source, num_bytes))
        if source != target:
            self.own.append((target, source, num_bytes))


@dataclass(frozen=True)
class GroupCopies:
    """The copies that this rank makes for a group of collectives, and the memory of others that it writes."""

    moves: tuple[Move, ...]
    own: tuple[Move, ...]
    memory: tuple[OpenedMemory, ...]


class PeerCopies:
    """This rank among those of `host`, which all make their copies at the same time and are on one machine.

    PeerError, on all ranks, if one of them cannot reach the memory of another.
    """

    def __init__(self, host: World, gpu: CudaPeer, machine: str) -> None:
        self._host, self._gpu = host, gpu
        self._rank, self._size = host.rank, host.size
        self._others = [(self._rank + apart) % self._size for apart in range(1, self._size)]
        self._number = 0  # of groups whose addresses the ranks have exchanged
        self._words, self._peers = gpu.words(KINDS * host.size), dict[int, int]()
        self._memory: list[OpenedMemory] = []
        replies = host.gather([machine, *self._tried(lambda: gpu.exported(self._words))])
        problem = "" if len({one[0] for one in replies}) == 1 else "the ranks are on several machines"
        problem = problem or next((one[2] for one in replies if one[2]), "")
        if not problem:
            problems = host.gather(self._tried(lambda: self._open([one[1] for one in replies]))[1])
            problem = str(next(filter(None, problems), ""))
        if problem:
            raise PeerError(problem)

    def _open(self, exported: Sequence[tuple[str, int]]) -> None:
        for rank in self._others:
            handle, offset = exported[rank]
            self._memory.append(self._gpu.opened(handle))
            self._peers[rank] = self._memory[-1].address + offset

    def _tried(self, work: Callable[[], Any]) -> tuple[Any, str]:
        """What a step returns, and why it failed."""
        try:
            return work(), ""
        except PeerError as error:
            return None, f"the GPU of rank {self._rank} does not share memory: {error}"

    def agreed(self, transfers: Transfers) -> GroupCopies:
        """The copies of a group. All ranks ask at the same time.

        WorldError if what one rank sends is not what another receives.
        """
        self._number += 1
        free = {rank: [(*self._gpu.exported(at), size) for at, size in one] for rank, one in transfers.received.items()}
        replies = self._host.gather({"group": self._number, "free": [free.get(rank, []) for rank in range(self._size)]})
        if any(not isinstance(one, dict) or one.get("group") != self._number for one in replies):
            raise WorldError(f"rank {self._rank} copies its group {self._number}, and others do something else")
        memory: dict[str, OpenedMemory] = {}
        moves = []
        for rank in self._others:
            theirs, mine = replies[rank]["free"][self._rank], transfers.sent.get(rank, [])
            if [size for _, _, size in theirs] != [size for _, size in mine]:
                raise WorldError(f"rank {rank} receives other sizes than rank {self._rank} sends")
            for (handle, offset, size), (source, _) in zip(theirs, mine, strict=True):
                try:
                    memory[handle] = memory.get(handle) or self._gpu.opened(handle)
                except PeerError as error:
                    text = f"rank {self._rank} cannot reach the memory of rank {rank} any more: {error}"
                    raise WorldError(text) from error
                moves.append((memory[handle].address + offset, source, size))
        return GroupCopies(tuple(moves), tuple(transfers.own), tuple(memory.values()))

    def run(self, copies: GroupCopies) -> None:
        """Makes the copies of a group, in the order of the current stream."""
        join = self._gpu.beside(copies.own)
        self._meet(READY)
        for move in copies.moves:
            self._gpu.copy(*move)
        self._meet(ARRIVED)
        join()

    def close(self) -> None:
        """Lets go what waits for other ranks, which may be gone."""
        self._gpu.release(self._words, KINDS * self._size)

    def _meet(self, kind: int) -> None:
        mine = [self._words + self._place(kind, rank) for rank in self._others]
        self._gpu.meet([self._peers[rank] + self._place(kind, self._rank) for rank in self._others], mine)

    def _place(self, kind: int, rank: int) -> int:
        """Offset of the word that `rank` sets."""
        return WORD * (kind * self._size + rank)


def machine() -> str:
    """What tells this machine, since it was started, from others."""
    try:
        return BOOT.read_text("ascii").strip()
    except OSError:
        return socket.gethostname()


class OpenedMemory:
    """An allocation of another process, until nothing refers to this."""

    def __init__(self, handle: str) -> None:
        try:
            self.address = _open(handle)
        except RuntimeError:
            gc.collect()  # what lay at the same address may still be open, for programs that are garbage
            try:
                self.address = _open(handle)
            except RuntimeError as error:
                raise PeerError(str(error)) from error
        weakref.finalize(self, _close, self.address).atexit = False


def _open(handle: str) -> int:
    from cupy.cuda import runtime

    return int(runtime.ipcOpenMemHandle(bytes.fromhex(handle)))


def _close(address: int) -> None:
    from cupy.cuda import runtime

    runtime.deviceSynchronize()  # a graph that reads it may still run
    runtime.ipcCloseMemHandle(address)


class CudaPeer:
    """The current device of this process, its GPU. Copies and meetings are in the order of the current stream, or in a
    graph."""

    def __init__(self) -> None:
        from cupy.cuda import Stream, runtime

        self._device = runtime.getDevice()
        self._beside = Stream(non_blocking=True)
        self._opened: weakref.WeakValueDictionary[str, OpenedMemory] = weakref.WeakValueDictionary()

    def exported(self, address: int) -> tuple[str, int]:
        """A handle for the allocation that an address is in, in hexadecimal digits, and the offset in it.

        PeerError if it has none.
        """
        from cuda.bindings import driver
        from cupy.cuda import runtime

        status, start, _ = driver.cuMemGetAddressRange(address)
        _check(status)
        try:
            return runtime.ipcGetMemHandle(int(start)).hex(), address - int(start)
        except runtime.CUDARuntimeError as error:
            raise PeerError(str(error)) from error

    def opened(self, handle: str) -> OpenedMemory:
        """The memory of a handle of another process: one mapping for all, since CUDA has no second one in a process.

        PeerError where this GPU cannot reach it.
        """
        found = self._opened.get(handle)
        if found is None:
            found = self._opened[handle] = OpenedMemory(handle)
        return found

    def words(self, count: int) -> int:
        """Address of words that are 0, in an allocation of their own, which has a handle."""
        from cupy.cuda import runtime

        assert count * WORD <= ALLOCATION
        address = int(runtime.malloc(ALLOCATION))
        runtime.memset(address, 0, ALLOCATION)
        runtime.deviceSynchronize()
        return address

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """A copy, by a copy engine where the target is on another GPU."""
        from cupy.cuda import get_current_stream, runtime

        runtime.memcpyAsync(target, source, num_bytes, runtime.memcpyDeviceToDevice, get_current_stream().ptr)

    def beside(self, moves: Sequence[Move]) -> Callable[[], None]:
        """Begins copies within this GPU beside what comes next; what comes after the returned call waits for them."""
        from cupy.cuda import Event, get_current_stream

        if not moves:
            return lambda: None
        start, end, stream = Event(disable_timing=True), Event(disable_timing=True), get_current_stream()
        start.record(stream)
        self._beside.wait_event(start)
        with self._beside:
            for move in moves:
                self.copy(*move)
        end.record(self._beside)
        return lambda: get_current_stream().wait_event(end)

    def meet(self, theirs: Sequence[int], mine: Sequence[int]) -> None:
        """Sets words of other GPUs to 1, waits until each of its own is 1, and sets these to 0.

        These are commands of the stream itself, which take neither a kernel nor a copy engine.

        What was copied before has arrived when a word is set: the command has a memory barrier for the whole system.
        """
        from cuda.bindings import driver
        from cupy.cuda import get_current_stream

        commands = [*(_sets(word, 1) for word in theirs), *map(_waits, mine), *(_sets(word, 0) for word in mine)]
        _check(driver.cuStreamBatchMemOp(get_current_stream().ptr, len(commands), commands, 0)[0])

    def release(self, words: int, count: int) -> None:
        """Lets all that waits for these words go on, in whatever order it waits; in any thread.

        Sets them again and again, since what waits clears them, until the GPU has nothing more to do.
        """
        from cuda.bindings import driver
        from cupy.cuda import Stream, runtime

        runtime.setDevice(self._device)
        beside = Stream(non_blocking=True)

        def wait() -> None:
            runtime.setDevice(self._device)
            runtime.deviceSynchronize()

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        until = time.monotonic() + RELEASE_S
        while waiting.is_alive() and time.monotonic() < until:
            _check(driver.cuMemsetD32Async(words, 1, count, beside.ptr)[0])
            beside.synchronize()
            waiting.join(1e-3)


def _waits(word: int) -> Any:
    """The command that waits until a word is 1."""
    from cuda.bindings import driver

    command = driver.CUstreamBatchMemOpParams()
    command.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
    command.waitValue.operation = command.operation
    command.waitValue.address, command.waitValue.value = word, 1
    command.waitValue.flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
    return command


def _sets(word: int, value: int) -> Any:
    """The command that sets a word."""
    from cuda.bindings import driver

    command = driver.CUstreamBatchMemOpParams()
    command.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
    command.writeValue.operation = command.operation
    command.writeValue.address, command.writeValue.value = word, value
    command.writeValue.flags = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
    return command


def _check(status: Any) -> None:
    if int(status):
        raise RuntimeError(f"the driver refuses: {status.name}")
