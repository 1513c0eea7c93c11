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

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmq.comm.world import World
from llmq.errors import WorldError
from llmq.hardware.cuda_peer import WORD, CudaPeer, Move, OpenedMemory, PeerError

READY, ARRIVED = 0, 1  # the kinds of meetings
KINDS = 2


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
        self._number = 0  # of groups whose addresses the ranks have told each other
        self._words, self._peers = 0, dict[int, int]()
        self._memory: list[OpenedMemory] = []
        told = host.gather([machine, *self._tried(lambda: list(gpu.exported(self._made_words())))])
        problem = "" if len({one[0] for one in told}) == 1 else "the ranks are on several machines"
        problem = problem or next((one[2] for one in told if one[2]), "")
        if not problem:
            problem = self._all_of(self._tried(lambda: self._open([one[1] for one in told]))[1])
        if problem:
            raise PeerError(problem)

    def _made_words(self) -> int:
        self._words = self._gpu.words(KINDS * self._size)
        return self._words

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

    def _all_of(self, problem: str) -> str:
        """The first problem that a rank has."""
        return str(next(filter(None, self._host.gather(problem)), ""))

    def agreed(self, transfers: Transfers) -> GroupCopies:
        """The copies of a group. All ranks ask at the same time.

        WorldError if what one rank sends is not what another receives.
        """
        self._number += 1
        free = {rank: [(*self._gpu.exported(at), size) for at, size in one] for rank, one in transfers.received.items()}
        told = self._host.gather({"group": self._number, "free": [free.get(rank, []) for rank in range(self._size)]})
        if any(not isinstance(one, dict) or one.get("group") != self._number for one in told):
            raise WorldError(f"rank {self._rank} copies its group {self._number}, and others do something else")
        memory: dict[str, OpenedMemory] = {}
        moves = []
        for rank in self._others:
            theirs, mine = told[rank]["free"][self._rank], transfers.sent.get(rank, [])
            if [size for _, _, size in theirs] != [size for _, size in mine]:
                raise WorldError(f"rank {rank} receives other sizes than rank {self._rank} sends")
            for (handle, offset, size), (source, _) in zip(theirs, mine, strict=True):
                if handle not in memory:
                    memory[handle] = self._reached(handle, rank)
                moves.append((memory[handle].address + offset, source, size))
        return GroupCopies(tuple(moves), tuple(transfers.own), tuple(memory.values()))

    def _reached(self, handle: str, rank: int) -> OpenedMemory:
        try:
            return self._gpu.opened(handle)
        except PeerError as error:
            raise WorldError(f"rank {self._rank} cannot reach the memory of rank {rank} any more: {error}") from error

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
