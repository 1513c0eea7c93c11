"""What is known of each rank, and who is lost: the judgement of the watchdog, without clocks and sockets.

Time comes in ticks of the one who judges. So a judge that was stopped itself (Ctrl-Z, a suspended laptop) has not heard
from anyone for one tick, not for an hour.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SILENCE = 0.75  # of the patience: a rank that is not heard is lost
SETTLED = 0.25  # of the patience: what the ranks say fits together again


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
    """A rank that is lost, or the launcher (None): why, where it was last seen, its Python stacks if it could say."""

    rank: int | None
    why: str
    beat: Beat | None
    stacks: str = ""

    def __str__(self) -> str:
        where = f" (last seen in {self.beat})" if self.beat else ""
        who = "the launcher" if self.rank is None else f"rank {self.rank}"
        return f"{who} is lost: {self.why}{where}"


@dataclass
class _Rank:
    """`silent` and `still` are seconds: since it was heard, and since what it says has changed."""

    beat: Beat | None = None
    doing: str = ""  # something that may take long
    silent: float = 0.0
    still: float = 0.0
    has_left: bool = False
    problem: str = ""  # why it is lost, if that is known at once


@dataclass
class Board:
    """The ranks that are watched, of `size`. A rank that is lost is found within `patience` seconds."""

    size: int
    patience: float = 0.0
    _ranks: dict[int, _Rank] = field(default_factory=dict)

    def begin(self, rank: int, patience: float) -> None:
        """A rank is watched from now on; the longest patience holds for all."""
        self._ranks[rank] = _Rank()
        self.patience = max(self.patience, patience)

    def heard(self, rank: int, beat: Beat, doing: str) -> None:
        """A sign of life; `doing` names what may take long, and is empty if nothing does."""
        found = self._ranks[rank]
        found.silent = 0.0
        if (beat, doing) != (found.beat, found.doing):
            found.beat, found.doing, found.still = beat, doing, 0.0

    def left(self, rank: int) -> None:
        """A rank has come to its end."""
        self._ranks[rank].has_left, self._ranks[rank].still = True, 0.0

    def lose(self, rank: int, why: str) -> None:
        """A rank has failed or disappeared, be it before it was watched."""
        self._ranks.setdefault(rank, _Rank()).problem = why

    def knows(self, rank: int) -> bool:
        """Whether a rank is watched, was, or is lost."""
        return rank in self._ranks

    def beat(self, rank: int) -> Beat | None:
        """What it said last."""
        return self._ranks[rank].beat if rank in self._ranks else None

    def tick(self, seconds: float) -> None:
        """Time passes."""
        for rank in self._ranks.values():
            rank.silent += seconds
            rank.still += seconds

    def lost(self) -> list[LostRank]:
        """The ranks that are lost by now: those that ended or are silent, else those that the others wait for."""
        reasons = {number: self._absent(rank) for number, rank in self._ranks.items()}
        if not any(reasons.values()):
            reasons = self._waited_for()
        return [LostRank(number, why, self._ranks[number].beat) for number, why in sorted(reasons.items()) if why]

    def _absent(self, rank: _Rank) -> str:
        if rank.problem:
            return rank.problem
        if not rank.has_left and rank.silent >= SILENCE * self.patience:
            return f"no sign of life for {rank.silent:.0f} s: its process, or its machine, is stopped or cut off"
        return ""

    def _waited_for(self) -> dict[int, str]:
        """Why others wait, by the rank that makes them.

        A rank waits if it has been in one collective for as long as the patience is. It waits for those that have begun
        the fewest, unless these do something that may take long; if all have begun the same, that one never ends.
        All of these must have stood still for so long: one that just came may have released the others. What ranks say
        is as old as their last beat, so there is no judgement until none has said anything new for a while.
        """
        here = [rank for rank in self._ranks.values() if not rank.has_left]
        counts = {number: rank.beat.count for number, rank in self._ranks.items() if rank.beat}
        if len(counts) < self.size or min((rank.still for rank in here), default=0.0) < SETTLED * self.patience:
            return {}
        waiting = {number for number in counts if self._is_stuck(number) and self._is_inside(number)}
        lowest = min(counts.values())
        behind = {number for number, count in counts.items() if count == lowest}
        if not waiting or any(self._ranks[number].still < self.patience for number in behind):
            return {}
        stuck = {number for number in behind if self._is_stuck(number)}
        seconds = round(max((self._ranks[number].still for number in stuck), default=0.0))
        if waiting <= behind:
            return dict.fromkeys(waiting, f"it does not come out of a collective for {seconds} s")
        reasons = dict.fromkeys(stuck, f"it stands still for {seconds} s, and others wait for it")
        return reasons | {n: "it has ended, and others wait for it" for n in behind if self._ranks[n].has_left}

    def _is_inside(self, number: int) -> bool:
        beat = self._ranks[number].beat
        return beat is not None and bool(beat.collective)

    def _is_stuck(self, number: int) -> bool:
        rank = self._ranks[number]
        return rank.still >= self.patience and not rank.doing and not rank.has_left
