"""The fastest points of a lattice that fit in memory, found without the cost of most of them.

A point has an index for each axis of settings, which go from fast to frugal: a further one takes no fewer seconds and
no more bytes of the device, and no fewer of the host. So the first corner of a box of points bounds its seconds from
below and the last one its bytes, and boxes that cannot hold an answer are left whole. Boxes wait in order of their
bounds (branch and bound, Land and Doig 1960), hence points come out in the order of their seconds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

LESS = 0.98  # of the bytes before it is what a slower point has to need
Point = tuple[int, ...]
Box = tuple[Point, Point]  # its first and its last point


@dataclass(frozen=True)
class Cost:
    """What a plan takes: bytes of the device and of the host, and seconds of an optimizer step."""

    num_bytes: int
    host_bytes: int
    seconds: float

    def missing(self, free_bytes: int, free_host_bytes: int) -> int:
        """Bytes that are not there, of both together."""
        return max(self.num_bytes - free_bytes, 0) + max(self.host_bytes - free_host_bytes, 0)


def fastest(
    boxes: Iterable[Box],
    cost_at: Callable[[Point], Cost | None],
    accepts: Callable[[Point], bool],
    *,
    free_bytes: int,
    free_host_bytes: int,
    within_s: float = math.inf,
) -> Iterator[tuple[Point, Cost]]:
    """Points of the boxes that fit, the fastest first, then the fastest of those that need less of the device.

    None takes more than `within_s` seconds.

    `cost_at` gives None for settings that cannot be combined, and `accepts` has the last word on a point that would
    come out; both are asked several times.
    """
    waiting: list[tuple[float, int, int, Point, Point]] = []
    number, room = count(), free_bytes

    def wait(low: Point, high: Point, bound: float) -> None:
        fast, frugal = cost_at(low), cost_at(high)
        if (frugal is not None and frugal.num_bytes > room) or (fast is not None and fast.host_bytes > free_host_bytes):
            return
        seconds = bound if fast is None else max(bound, fast.seconds)
        if seconds > within_s:
            return
        heapq.heappush(waiting, (seconds, sum(low), next(number), low, high))

    for low, high in boxes:
        wait(low, high, 0.0)
    while waiting:
        seconds, _, _, low, high = heapq.heappop(waiting)
        cost = cost_at(low)
        if cost is not None and not cost.missing(room, free_host_bytes) and accepts(low):
            room = int(LESS * cost.num_bytes)
            yield low, cost
        for piece in _halves(low, high):
            wait(*piece, seconds)


def _halves(low: Point, high: Point) -> list[Box]:
    """A box in two, cut across its first axis of several points; nothing of a single point."""
    axis = next((axis for axis, (a, b) in enumerate(zip(low, high, strict=True)) if a < b), None)
    if axis is None:
        return []
    middle = (low[axis] + high[axis]) // 2
    first = (*high[:axis], middle, *high[axis + 1 :])
    second = (*low[:axis], middle + 1, *low[axis + 1 :])
    return [(low, first), (second, high)]
