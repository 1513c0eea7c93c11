"""The store at which the ranks of a run meet, which from then on judges who is lost.

A server in the process of the launcher or of rank 0, and one connection from each rank as long as that runs. Ranks and
server may start in any order. A rank joins with the port at which others reach it, and hears where all are once the
last one has come; the server names those that are missing at the deadline. Then each rank says every second where it
is. One that leaves says so, too: one whose connection ends without that is lost, and all others hear of it.

Who is lost is judged without clocks and sockets: time comes in ticks of the one who judges. So a judge that was stopped
itself (Ctrl-Z, a suspended laptop) has not heard from anyone for one tick, not for an hour.
"""

import ipaddress
import os
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llmq.comm.wire import HANDSHAKE_S, WATCHING, Channel, Door, Refused
from llmq.errors import WorldError

SILENCE = 0.75  # of the patience: a rank that is not heard is lost
SETTLED = 0.25  # of the patience: what the ranks say fits together again
BEATS = 10  # in the time of the patience, and at least one a second
PURPOSE = "store"
NUM_NOTES = 8
TICK_S = 0.1  # from one judgement to the next
SLACK = 3  # beats, by which a rank is found within the patience
FAILED_S = 2.0  # in which ranks that fail for the same reason may end as they should
KEEPER_WAITS_S = 3.0  # until all have ended before the rank that keeps the store does


def seconds_of_beat(patience: float) -> float:
    """From one sign of life to the next."""
    return min(1.0, patience / BEATS)


@dataclass(frozen=True)
class Beat:
    """Where a rank is. `collective` is the one that it is in now, empty while it computes or reads.

    `count` says how many collectives it has begun, so that the same number is the same collective on every rank.
    """

    step: int
    collective: str
    count: int

    def __str__(self) -> str:
        where = f"in {self.collective}, which is" if self.collective else "after"
        return f"step {self.step}, {where} collective {self.count}"


def lost_in_words(rank: int | None, why: str, beat: Beat | None = None) -> str:
    """That a rank is lost, or the launcher (None): why, and where it was last seen."""
    who = "the launcher" if rank is None else f"rank {rank}"
    return f"{who} is lost: {why}" + (f" (last seen in {beat})" if beat else "")


@dataclass
class Watched:
    """What is known of a rank. `silent` and `still` are seconds: since it was heard, and since what it says changed."""

    beat: Beat | None = None
    doing: str = ""  # something that may take long
    silent: float = 0.0
    still: float = 0.0
    has_left: bool = False
    problem: str = ""  # why it is lost, if that is known at once

    def hear(self, beat: Beat, doing: str) -> None:
        """A sign of life; `doing` names what may take long, and is empty if nothing does."""
        self.silent = 0.0
        if (beat, doing) != (self.beat, self.doing):
            self.beat, self.doing, self.still = beat, doing, 0.0

    def leave(self) -> None:
        """It has come to its end."""
        self.has_left, self.still = True, 0.0

    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.silent += seconds
        self.still += seconds

    def absence(self, patience: float) -> str:
        """Why it is lost, whatever the others do; empty if it is not."""
        if not self.problem and not self.has_left and self.silent >= SILENCE * patience:
            return f"no sign of life for {self.silent:.0f} s: its process, or its machine, is stopped or cut off"
        return self.problem


def lost_ranks(ranks: Mapping[int, Watched], size: int, patience: float) -> dict[int, str]:
    """Why ranks are lost by now: those that ended or are silent, else those that the others wait for.

    `ranks` has those of `size` that are watched, or have ended. A rank that is lost is found within `patience` seconds.

    A rank waits if it has been in one collective for as long as the patience is. It waits for those that have begun the
    fewest, unless these do something that may take long; if all have begun the same, that one never ends. All of these
    must have stood still for so long: one that just came may have released the others. What ranks say is as old as
    their last beat, so there is no judgement until none has said anything new for a while.
    """
    if reasons := {number: why for number, rank in ranks.items() if (why := rank.absence(patience))}:
        return reasons
    beats = {number: rank.beat for number, rank in ranks.items() if rank.beat}
    newest = min((rank.still for rank in ranks.values() if not rank.has_left), default=0.0)
    if len(beats) < size or newest < SETTLED * patience:
        return {}
    stuck = {n for n, rank in ranks.items() if rank.still >= patience and not rank.doing and not rank.has_left}
    waiting = {number for number in stuck if beats[number].collective}
    lowest = min(beat.count for beat in beats.values())
    behind = {number for number, beat in beats.items() if beat.count == lowest}
    if not waiting or any(ranks[number].still < patience for number in behind):
        return {}
    seconds = round(max((ranks[number].still for number in behind & stuck), default=0.0))
    if waiting <= behind:
        return dict.fromkeys(waiting, f"it does not come out of a collective for {seconds} s")
    reasons = dict.fromkeys(behind & stuck, f"it stands still for {seconds} s, and others wait for it")
    return reasons | {n: "it has ended, and others wait for it" for n in behind if ranks[n].has_left}


@dataclass(eq=False)
class _Member:
    """A rank that is here. `place` is where others reach it: an address, or None on the store's machine, and a port.

    `is_keeper`: it is in the store's process, which ends with it.
    """

    channel: Channel
    address: str
    place: tuple[str | None, int]
    is_keeper: bool

    def tell(self, message: dict[str, Any]) -> None:
        """Sends a message in a thread: a rank that is stopped takes none, and one that has ended misses nothing."""

        def send() -> None:
            with suppress(OSError):
                self.channel.send(message)

        threading.Thread(target=send, name=f"{WATCHING}: tell", daemon=True).start()


class StoreServer:
    """A store for `size` ranks, at `port` of this machine (0: any that is free), until it is closed.

    The ranks have `deadline` seconds from now to come. Where `host` is plainly this machine (127.0.0.1), only this
    machine can connect. WorldError if the port cannot be used.
    """

    def __init__(self, host: str, port: int, size: int, token: str, deadline: float) -> None:
        self._size, self._deadline = size, (time.monotonic() + deadline, deadline)
        self._changed = threading.Condition()  # holds for all that follows
        self._members: dict[int, _Member] = {}
        self._has_met, self._problem = False, ""  # all are here, or why they will not be
        self._notes: list[str] = []  # what may explain why a rank is missing
        self._watched: dict[int, Watched] = {}  # also those that have ended
        self._patience, self._has_judged = 0.0, False
        self._is_closed = threading.Event()
        try:
            self._door = Door(host, port, token, PURPOSE, size, self._serve, self._note)
        except OSError as error:
            raise WorldError(
                f"the store of the run cannot use port {port} ({error.strerror}): choose another"
            ) from error
        self.port = self._door.port
        self._clock = threading.Thread(target=self._tick, name=f"{WATCHING}: clock", daemon=True)
        self._clock.start()

    def close(self, grace: float = 60.0) -> None:
        """Ends the store, as soon as all ranks that are here have left, or after `grace` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._members, grace)
            self._is_closed.set()
            left = list(self._members.values())
        for member in left:
            if self._has_met:
                with suppress(OSError):
                    member.channel.send({"end": True})
            member.channel.end()
        self._door.close()
        self._clock.join()

    def refuse(self, problem: str) -> None:
        """Unless all are here, tells the ranks that wait, and those that still come, why the others will not."""
        with self._changed:
            if not self._has_met and not self._problem:
                self._problem = problem
                for member in self._members.values():
                    member.tell({"error": problem})

    def _serve(self, channel: Channel, address: str) -> None:
        """One rank, from its first message to its end."""
        match hello := channel.receive(time.monotonic() + HANDSHAKE_S):
            case {"rank": int(rank), "size": int(size), "port": int(port), "pid": int(pid), "seconds": float(seconds)}:
                is_here = ipaddress.ip_address(address).is_loopback
                member = _Member(channel, address, (None if is_here else address, port), is_here and pid == os.getpid())
            case _:
                raise Refused(f"an unknown request: {hello}")
        with self._changed:
            if problem := self._unfit(rank, size, address):
                self._note(problem)
            elif not (problem := self._problem):
                self._join(rank, member, seconds)
        if problem:
            channel.send({"error": problem})
            channel.close()
            return
        try:
            while True:
                message = channel.receive()
                with self._changed:
                    self._hear(rank, message)
                if "beat" in message:
                    channel.send({})  # a sign of life of this process
        finally:
            self._gone(rank)

    def _unfit(self, rank: int, size: int, address: str) -> str:
        """Why a rank cannot join, if it cannot."""
        if size != self._size:
            return f"rank {rank} on {address} belongs to a run of {size} ranks, and this one has {self._size}"
        if not 0 <= rank < self._size:
            return f"there is no rank {rank} (of {address}) in a run of {self._size}: ranks are 0 to {self._size - 1}"
        if rank in self._members or self._has_met:
            there = self._members[rank].address if rank in self._members else "a process that has ended"
            return f"rank {rank} joined twice, from {there} and from {address}: two processes have the same rank"
        return ""

    def _join(self, rank: int, member: _Member, seconds: float) -> None:
        self._members[rank] = member
        self._deadline = min(self._deadline, (time.monotonic() + seconds, round(seconds, 1)))
        if len(self._members) == self._size:
            self._has_met = True
            ranks = sorted(self._members.items())
            keepers = [rank for rank, one in ranks if one.is_keeper]
            for _, one in ranks:
                with suppress(OSError):
                    one.channel.send({"places": [other.place for _, other in ranks], "keepers": keepers})

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        watched = self._watched.setdefault(rank, Watched())
        match message:
            case {"watch": float(patience)}:  # the longest holds for all
                self._patience = max(self._patience, patience - SLACK * seconds_of_beat(patience))
            case {"beat": [int(step), str(collective), int(count)], "doing": str(doing)}:
                watched.hear(Beat(step, collective, count), doing)
            case {"left": True}:
                watched.leave()
            case {"failed": str(why)}:
                watched.leave()  # until others had the time to fail in the same way
                timer = threading.Timer(FAILED_S, self._lose, (rank, f"it has failed with {why}"))
                timer.daemon, timer.name = True, f"{WATCHING}: failed"
                timer.start()
            case _:
                raise Refused(f"an unknown message: {message}")

    def _gone(self, rank: int) -> None:
        """A rank's connection has ended. Before all were here, it may come again."""
        with self._changed:
            del self._members[rank]
            self._changed.notify_all()
            is_run = self._has_met and not self._is_closed.is_set()
            if is_run and not self._watched.setdefault(rank, Watched()).has_left:
                self._lose(rank, "its process has ended")

    def _tick(self) -> None:
        """Time passes, in small steps also where this process was stopped meanwhile."""
        before = time.monotonic()
        while not self._is_closed.wait(TICK_S):
            now = time.monotonic()
            with self._changed:
                if now > self._deadline[0]:
                    missing = in_words(set(range(self._size)) - self._members.keys())
                    said = f"of {self._size} ranks, {missing} did not come within {self._deadline[1]:g} s"
                    self.refuse("; ".join([said, *self._notes]))
                for watched in self._watched.values():
                    watched.tick(min(now - before, 2 * TICK_S))
                self._judge()
            before = now

    def _lose(self, rank: int, why: str) -> None:
        with self._changed:
            self._watched[rank].problem = why
            self._judge()

    def _judge(self) -> None:
        """Once ranks are lost all hear of it, and nothing is judged any more."""
        lost = {} if self._has_judged else lost_ranks(self._watched, self._size, self._patience)
        if lost:
            self._has_judged = True
            said = "; ".join(lost_in_words(one, lost[one], self._watched[one].beat) for one in sorted(lost))
            about = (set(lost), {"lost": said})
            threading.Thread(target=self._announce, args=about, name=f"{WATCHING}: verdict", daemon=True).start()

    def _announce(self, lost: set[int], verdict: dict[str, Any]) -> None:
        """Tells all who is lost; ranks that keep the store hear it last, since it ends with them."""
        with self._changed:
            here = self._members
            others = {rank for rank, member in here.items() if not member.is_keeper}
            for rank in others:
                here[rank].tell(verdict)
            self._changed.wait_for(lambda: not (others - lost) & here.keys(), KEEPER_WAITS_S)
            for rank in here.keys() - others:
                here[rank].tell(verdict)

    def _note(self, text: str) -> None:
        with self._changed:
            if text not in self._notes and len(self._notes) < NUM_NOTES:
                self._notes.append(text)


def in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 1, 4 to 7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    words = [" to ".join(map(str, span)) for span in spans]
    return f"rank{'s' if len(words) > 1 or ' ' in words[0] else ''} {', '.join(words)}"
