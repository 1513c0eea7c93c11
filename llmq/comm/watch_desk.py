"""The side of the watchdog that the store's server has: it hears the ranks, judges, and tells all who is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from llmq.comm.board import Beat, Board, LostRank
from llmq.comm.wire import Refused, frame, read_frame

BEATS = 10  # in the time of the patience, and at least one a second
SLACK = 3  # of these, by which a rank is found within the patience
POLL_S = 0.02
STACKS_S = 2.0  # for the stacks of a rank that stands still
FAILED_S = 2.0  # in which ranks that fail for the same reason may end as they should
TOLD_S = 3.0  # until all have ended before the rank that keeps the store does
FAILED = "it has failed with"


def seconds_of_beat(patience: float) -> float:
    """From one sign of life to the next."""
    return min(1.0, patience / BEATS)


class WatchDesk:
    """The connections of the watchdogs of `size` ranks. All calls are made in one asyncio loop."""

    def __init__(self, size: int) -> None:
        self._board = Board(size)
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._keepers: list[int] = []  # ranks in the process of the store, which ends with them
        self._stacks: dict[int | None, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._verdict: dict[str, Any] | None = None

    async def serve(self, hello: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One rank's connection, to its end. Refused if the rank has one already."""
        rank, patience = int(hello["rank"]), float(hello["patience"])
        if rank in self._writers:
            raise Refused(f"rank {rank} is watched twice")
        interval = seconds_of_beat(patience)
        self._board.begin(rank, patience - SLACK * interval)
        self._writers[rank] = writer
        if hello["keeper"]:
            self._keepers.append(rank)
        if not self._tasks:
            self._tasks.append(asyncio.create_task(self._tick(interval)))
        if self._verdict is not None:
            writer.write(frame(self._verdict))
        said = "its process has ended"
        try:
            while said:
                head, _ = await read_frame(reader, limit=0)
                said = self._hear(rank, head, said)
        except (OSError, EOFError, Refused):
            pass  # `said` is why
        finally:
            del self._writers[rank]
            if said:
                wait = FAILED_S if said.startswith(FAILED) else 0.0
                asyncio.get_running_loop().call_later(wait, self._lose, rank, said)

    def end(self) -> None:
        """The store ends before these ranks do: they are not watched any more."""
        for writer in self._writers.values():
            writer.write(frame({"end": True}))

    def _hear(self, rank: int, head: dict[str, Any], said: str) -> str:
        """What would make this rank lost if its connection ended now; empty if it has left."""
        match head:
            case {"op": "beat", "step": int(step), "collective": str(name), "count": int(count), "doing": str(doing)}:
                self._board.heard(rank, Beat(step, name, count), doing)
                keepers = [(keeper, self._board.beat(keeper)) for keeper in self._keepers]
                seen = [[keeper, asdict(beat) if beat else None] for keeper, beat in keepers]
                self._writers[rank].write(frame({"keepers": seen}))
            case {"op": "stacks", "text": str(text)}:
                self._stacks[rank] = text
            case {"op": "failed", "why": str(why)}:
                return f"{FAILED} {why}"
            case {"op": "bye"}:
                self._board.left(rank)
                return ""
            case _:
                raise Refused(f"an unknown message: {head}")
        return said

    async def _tick(self, interval: float) -> None:
        while True:
            await asyncio.sleep(interval)
            self._board.tick(interval)
            self._judge()

    def unwatched_lost(self, rank: int, why: str) -> None:
        """A rank's process has ended; that says nothing new of one that is watched, which may just have left."""
        if not self._board.knows(rank):
            self._lose(rank, why)

    def _lose(self, rank: int, why: str) -> None:
        self._board.lose(rank, why)
        self._judge()

    def _judge(self) -> None:
        if self._verdict is None and len(self._tasks) == 1 and (lost := self._board.lost()):
            self._tasks.append(asyncio.create_task(self._tell(lost)))

    async def _tell(self, lost: list[LostRank]) -> None:
        """Asks those that can still answer for their stacks, and tells all; those with the store end last."""
        asked = self._writers.keys() & {one.rank for one in lost}
        for rank in asked:
            self._writers[rank].write(frame({"stacks": True}))
        await _until(lambda: not asked & self._writers.keys() - self._stacks.keys(), STACKS_S)
        found = {one.rank: one for one in lost}
        found = {one.rank: one for one in self._board.lost()} | found  # others may have ended meanwhile
        full = [replace(one, stacks=self._stacks.get(rank, "")) for rank, one in found.items()]
        self._verdict = {"lost": [asdict(one) for one in full]}
        others = self._writers.keys() - set(self._keepers)
        for rank in others:
            self._writers[rank].write(frame(self._verdict))
        await _until(lambda: not others & self._writers.keys() - found.keys(), TOLD_S)
        for rank in self._writers.keys() & set(self._keepers):
            self._writers[rank].write(frame(self._verdict))


async def _until(met: Callable[[], bool], seconds: float) -> None:
    """Until `met`, or until the time is over."""
    for _ in range(round(seconds / POLL_S)):
        if met():
            return
        await asyncio.sleep(POLL_S)
