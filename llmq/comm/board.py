"""What is known of each rank, and who is lost: the judgement of the watchdog, without clocks and sockets.

Time comes in ticks of the one who judges. So a judge that was stopped itself (Ctrl-Z, a suspended laptop) has not heard
from anyone for one tick, not for an hour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SILENCE = 0.75  # of the patience: a rank that is not heard is lost
SETTLED = 0.25  # of the patience: what the ranks say fits together again
BEATS = 10  # in the time of the patience, and at least one a second


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


@dataclass(frozen=True)
class LostRank:
    """A rank that is lost, or the launcher (None): why, and where it was last seen."""

    rank: int | None
    why: str
    beat: Beat | None = None

    def __str__(self) -> str:
        where = f" (last seen in {self.beat})" if self.beat else ""
        who = "the launcher" if self.rank is None else f"rank {self.rank}"
        return f"{who} is lost: {self.why}{where}"


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

    def is_stuck(self, patience: float) -> bool:
        """Whether it has stood still for as long as the patience is, with nothing that may take long."""
        return self.still >= patience and not self.doing and not self.has_left


def lost_ranks(ranks: Mapping[int, Watched], size: int, patience: float) -> list[LostRank]:
    """The ranks that are lost by now: those that ended or are silent, else those that the others wait for.

    `ranks` has those of `size` that are watched, or have ended. A rank that is lost is found within `patience` seconds.
    """
    reasons = {number: why for number, rank in ranks.items() if (why := rank.absence(patience))}
    reasons = reasons or _waited_for(ranks, size, patience)
    return [LostRank(number, why, ranks[number].beat) for number, why in sorted(reasons.items())]


def _waited_for(ranks: Mapping[int, Watched], size: int, patience: float) -> dict[int, str]:
    """Why others wait, by the rank that makes them.

    A rank waits if it has been in one collective for as long as the patience is. It waits for those that have begun the
    fewest, unless these do something that may take long; if all have begun the same, that one never ends. All of these
    must have stood still for so long: one that just came may have released the others. What ranks say is as old as
    their last beat, so there is no judgement until none has said anything new for a while.
    """
    beats = {number: rank.beat for number, rank in ranks.items() if rank.beat}
    newest = min((rank.still for rank in ranks.values() if not rank.has_left), default=0.0)
    if len(beats) < size or newest < SETTLED * patience:
        return {}
    stuck = {number for number, rank in ranks.items() if rank.is_stuck(patience)}
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
