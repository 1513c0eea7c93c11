"""The settings with which a run fits, the fastest first: combinations of remedies as points of a lattice.

The one search behind the advice of a run that does not fit and behind --fit, which differ in what may change and in how
far a micro-batch may grow. A plain descent from the most frugal settings, which changes one remedy at a time, found a
step of 7B in 16 GiB that takes 11% longer: fewer rows and no residuals on the host are faster together alone.

A point has an index for each axis of settings, which go from fast to frugal: a further one takes no fewer seconds and
no more bytes of the device, and no fewer of the host. So the first corner of a box of points bounds its seconds from
below and the last one its bytes, and boxes that cannot hold an answer are left whole. Boxes wait in order of their
bounds (branch and bound, Land and Doig 1960), hence points come out in the order of their seconds.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, product

from llmq.engine.cost import Cost, Costs
from llmq.errors import UsageError
from llmq.plan.plan import uncollected
from llmq.plan.remedies import Alternative, Axis, Changes, Terms, axes, changes, is_open, levels, typed
from llmq.plan.spec import Spec, refuse
from llmq.screen import Report, unreported

LESS = 0.98  # of the bytes before it is what a slower point has to need
Point = tuple[int, ...]
Box = tuple[Point, Point]  # its first and its last point
WORTH = 1.01  # how much faster a step has to be for each kind of numbers that change
SURE = 0.96  # of the room: an estimate above that is confirmed by a plan of the whole
FEW_LAYERS = 8  # of a model whose plan is made as fast as an estimate
MARK = " (changes numbers)"


@dataclass(frozen=True)
class Available:
    """Bytes of the device and of the host that are free for a run; `in_one`: the device is the host."""

    free_bytes: int
    host_bytes: int
    in_one: bool = False

    def missing(self, cost: Cost) -> int:
        """Bytes that are not there, of both together."""
        return max(cost.num_bytes - self.free_bytes, 0) + max(cost.host_bytes - self.host_bytes, 0)


@dataclass(frozen=True)
class Setting:
    """Options that are added to those of a run, the spec with them, and what a step of `tokens` costs."""

    changes: Changes
    cost: Cost
    tokens: int
    mark: str = ""
    spec: Spec | None = None

    @property
    def flags(self) -> str:
        """The options as typed."""
        return typed(self.changes) + self.mark


class Search:
    """Settings of a run with what they cost, each found once.

    `costs` are those of a run that repeats its bits, and, where there is one (True), of one that need not. A plan of
    the whole has the last word on what takes nearly all of the room, and where it `plans_first`, as for a run that
    begins, on the first that comes out. `report` gets how many were priced.
    """

    def __init__(
        self,
        spec: Spec,
        terms: Terms,
        room: Available,
        costs: Mapping[bool, Costs],
        *,
        plans_first: bool = False,
        report: Report = unreported,
    ) -> None:
        self.spec, self.terms, self.room = spec, terms, room
        self._costs, self._plans_next, self._report = costs, plans_first, report
        self._alternatives: list[Alternative] = []
        self._axes: list[list[Axis]] = []  # of each alternative
        self._known: dict[Point, Cost | None] = {}
        self._enough: Point | None = None  # on each axis, as far as the first that was found

    def best(self, alternatives: Sequence[Alternative], most: int, within_s: float = math.inf) -> list[Setting]:
        """The fastest that fit in these seconds, each of the next with less of the device."""
        with uncollected():
            found = fastest(self._boxes(alternatives), self._weighed, self._fits, self.room, within_s)
            points = [point for point, _ in islice(found, most)]
        self._enough = self._enough or next((point[1:] for point in points), None)
        return [self._setting(point) for point in points]

    def nearest(self, alternatives: Sequence[Alternative]) -> Setting | None:
        """The setting that misses least, of those that need least of the device, or of the host."""
        with uncollected():
            # The frugal ends: what they miss, every other setting misses, too.
            points = {point for low, high in self._boxes(alternatives) for point in (high, (*low[:2], *high[2:]))}
            found = [self._setting(point) for point in sorted(points) if self._cost_at(point) is not None]
        return min(found, key=lambda one: self.room.missing(one.cost), default=None)

    def _boxes(self, alternatives: Sequence[Alternative]) -> list[Box]:
        """All points of these alternatives at any level, as far as anything that is given stays."""
        found: list[Box] = []
        # Levels and what changes numbers have no order, so each pair is a lattice of its own.
        for alternative in (one + level for one, level in product(alternatives, levels(self.spec))):
            base = alternative.of(self.spec)
            try:
                refuse(base)  # else all points of it would be tried
            except UsageError:
                continue
            if is_open(self.spec, base, self.terms):
                self._alternatives.append(alternative)
                self._axes.append(axes(base, self.terms))
                high = [len(axis) - 1 for axis in self._axes[-1]]
                # What is enough without a change of numbers is enough with one, which takes less.
                high = [*map(min, high, self._enough or high)]
                number = len(self._alternatives) - 1
                found.append(((number, *(0 for _ in high)), (number, *high)))
        return found

    def _spec_at(self, point: Point) -> Spec:
        number, *indices = point
        spec = self._alternatives[number].of(self.spec)
        for axis, index in zip(self._axes[number], indices, strict=True):
            spec = axis[index](spec)
        return spec

    def _setting(self, point: Point) -> Setting:
        cost, spec, alternative = self._cost_at(point), self._spec_at(point), self._alternatives[point[0]]
        assert cost is not None
        options = changes(self.spec, spec, self.terms) | ({"deterministic": False} if alternative.relaxed else {})
        tokens = self.terms.samples * spec.text_len * spec.sharding.size
        return Setting(options, cost, tokens, MARK if alternative.kinds else "", spec)

    def _weighed(self, point: Point) -> Cost | None:
        """The cost of a point, with more seconds where numbers change, or the bits of the next run."""
        cost, alternative = self._cost_at(point), self._alternatives[point[0]]
        return cost and replace(cost, seconds=cost.seconds * WORTH ** (alternative.kinds + alternative.relaxed))

    def _cost_at(self, point: Point) -> Cost | None:
        if point not in self._known:
            self._report(len(self._known), None)
            self._known[point] = self._cost(point)
        return self._known[point]

    def _cost(self, point: Point, *, whole: bool = False) -> Cost | None:
        """The cost of a point; None for what cannot be combined."""
        spec, costs = self._spec_at(point), self._costs[self._alternatives[point[0]].relaxed]
        steps = 1 if spec.memory.fused else self.terms.samples // spec.batch_size
        try:
            # An estimate is made of plans of two and three layers: of a small model it would take as long.
            if whole or spec.config.num_layers <= FEW_LAYERS:
                costs.plan(spec)
            cost = costs.of(spec, steps)
        except UsageError:
            return None
        # A micro-batch that does not divide the samples leaves some out: count what the step takes for all.
        cost = replace(cost, seconds=cost.seconds * self.terms.samples / (steps * spec.batch_size))
        if self.room.in_one:
            return replace(cost, num_bytes=cost.num_bytes + cost.host_bytes, host_bytes=0)
        return cost

    def _fits(self, point: Point) -> bool:
        """Whether a point fits, by a plan of the whole where an estimate is not enough."""
        cost = self._cost_at(point)
        assert cost is not None
        if self._plans_next or cost.num_bytes > SURE * self.room.free_bytes:
            cost = self._known[point] = self._cost(point, whole=True)
        fits = cost is not None and not self.room.missing(cost)
        self._plans_next = self._plans_next and not fits
        return fits


def fastest(
    boxes: Iterable[Box],
    cost_at: Callable[[Point], Cost | None],
    accepts: Callable[[Point], bool],
    room: Available,
    within_s: float = math.inf,
) -> Iterator[tuple[Point, Cost]]:
    """Points of the boxes that fit, the fastest first, then the fastest of those that need less of the device.

    None takes more than `within_s` seconds. `cost_at` gives None for what cannot be combined, and `accepts` has the
    last word on a point that would come out; both are asked several times.
    """
    waiting: list[tuple[float, int, int, Point, Point]] = []
    number = count()

    def wait(low: Point, high: Point, bound: float) -> None:
        fast, frugal = cost_at(low), cost_at(high)
        if frugal is not None and frugal.num_bytes > room.free_bytes:
            return
        if fast is not None and fast.host_bytes > room.host_bytes:
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
        # The fastest point of the box that waits first: nothing that is left can be faster.
        if cost is not None and not room.missing(cost) and accepts(low):
            room = replace(room, free_bytes=int(LESS * cost.num_bytes))
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
