"""A plan that does not fit: what makes it fit by itself, how many bytes are missing, and which remedies would help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from llmq.disk import MIB, shown
from llmq.engine.cost import Costs
from llmq.engine.predict import sustained
from llmq.errors import MemoryLimitError, UsageError
from llmq.hardware import cards
from llmq.hardware.cards import Card
from llmq.plan.lattice import Box, Cost, Point, fastest
from llmq.plan.plan import Plan, Scratch, uncollected
from llmq.plan.remedies import NOTHING, Changes, Remedy, axes, frames, last_frames, levels, typed
from llmq.plan.spec import Spec
from llmq.tensor import stored_bytes

WORTH = 0.99  # of the time of a step is the most that one with other numbers may take
BEST = 3  # remedies that are listed
KEEPING = 2  # of them such that change no number, where there are others
SURE = 0.96  # of the room: an estimate above that is confirmed by a plan of the whole
MUCH = 0.02  # of the room: attention workspace above that is worth doing without
FEW_LAYERS = 8  # of a model whose plan is made as fast as an estimate
USUAL_STEPS = 4  # micro-batches of a step, where that is not known
UNKNOWN = 2**62  # bytes of a host that is not known
USUAL_CARD = "H200"  # by whose rates remedies are in order where no card is known
MARK = " (changes numbers)"


@dataclass(frozen=True)
class Limits:
    """What there is for a run, and how it runs.

    `free_bytes` of the device, and of the host what each of `processes` on it may keep; None: not known.
    `in_one`: the device is the host, as on the CPU. Plans are made with `scratch_bytes`; `relaxed_scratch` is the same
    for a run that need not repeat its bits, None where there is no such run. `has_global_batch`: the number of
    micro-batches follows from their size. Times are those of a `card`, or not said.
    """

    free_bytes: int
    scratch_bytes: Scratch | None = None
    relaxed_scratch: Scratch | None = None
    host_bytes: int | None = None
    processes: int = 1
    in_one: bool = False
    micro_steps: int = USUAL_STEPS
    has_global_batch: bool = False
    card: Card | None = None


@dataclass(frozen=True)
class Setting:
    """Options that are added to those of a run, and what a step with them costs, in seconds of `tokens`."""

    changes: Changes
    cost: Cost
    tokens: int
    mark: str = ""

    @property
    def flags(self) -> str:
        """The options as typed."""
        return typed(self.changes) + self.mark


def table(best: Sequence[Setting], processes: int = 1, *, has_rates: bool = True) -> list[str]:
    """Settings by rank, with what they cost: bytes of the host are of all processes together."""
    host = f"host of {processes}" if processes > 1 else "host"
    rows = [("", "tokens/s", "device", host, "settings")]
    for number, one in enumerate(best, 1):
        rate = f"{one.tokens / one.cost.seconds:,.0f}" if has_rates else "-"
        rows.append((f"{number}", rate, shown(one.cost.num_bytes), shown(processes * one.cost.host_bytes), one.flags))
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return ["  ".join([*(f"{c:>{w}}" for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]


def lacking(plan: Plan, room: Limits) -> str:
    """What the plan lacks of the device, or of the host if that is known; empty where it fits."""
    chunks, free = plan.spec.memory.attention_chunks, room.free_bytes
    if (missing := plan.total_bytes - free) > 0:
        chunked = f" with attention's backward in {chunks} chunks" if chunks > 1 else ""
        needs = f"the run needs {shown(plan.total_bytes)}{chunked}"
        return f"{needs}, {shown(free)} are free, {shown(missing)} are missing"
    host = UNKNOWN if room.host_bytes is None else max(room.host_bytes - room.in_one * plan.total_bytes, 0)
    if plan.host_bytes and (missing := plan.host_bytes - host) > 0:
        count = room.processes
        each = f", {shown(plan.host_bytes)} in each of {count} processes" if count > 1 else ""
        return (
            f"the run keeps {shown(count * plan.host_bytes)} in host memory{each}, {shown(count * host)} are free "
            f"there, {shown(count * missing)} are missing"
        )
    return ""


def refuse_if_too_large(plan: Plan, room: Limits) -> None:
    """MemoryLimitError if the plan needs more than there is, with the remedies that fit."""
    if lack := lacking(plan, room):
        home = "device" if plan.total_bytes > room.free_bytes else "host"
        raise MemoryLimitError(lack, "\n".join((*advice(plan, room), requests(plan, home))))


def advice(plan: Plan, room: Limits) -> list[str]:
    """The best remedies, in lines."""
    if "update" not in plan.programs:
        return ["Use a smaller --batch-size, --max-tokens or --max-length"]
    found = remedies(plan, room)
    if not found:
        adapter = "" if plan.spec.adapters.freezes else "an adapter or "
        less = " leave out --offload options," if plan.host_bytes and plan.total_bytes <= room.free_bytes else ""
        return [
            f"No memory option makes it fit:{less} train {adapter}a smaller model, or use a device with more memory"
        ]
    title = "What fits, by predicted speed:" if room.card else "What fits, the fastest first:"
    lines = [title, *table(found, room.processes, has_rates=room.card is not None)]
    return [*lines, "--fit compares more settings"] if room.card else lines


def requests(plan: Plan, home: str = "device") -> str:
    """A table of what the run asks of a home, by segment of the plan, the largest first."""
    found = [(size, name) for name, size in plan.table(home).items() if size]
    lines = [f"  {'segment':<14}{'MiB':>12}"]
    lines += [f"  {name:<14}{size / MIB:>12,.1f}" for size, name in sorted(found, key=lambda one: (-one[0], one[1]))]
    lines.append(f"  {'all':<14}{sum(size for size, _ in found) / MIB:>12,.1f}")
    return "\n".join(lines)


def remedies(plan: Plan, room: Limits) -> list[Setting]:
    """The fastest combinations of remedies that fit, such that keep all numbers first."""
    search = _Remedies(plan, room)
    with uncollected():
        keeping = search.best([NOTHING], KEEPING)
        within_s = WORTH * keeping[0].cost.seconds if keeping else math.inf
        others = (*search.usual, *([] if keeping else last_frames(plan.spec)))  # the mildest first
        changing = (search.best([one], BEST - len(keeping), within_s) for one in others)
        return [*keeping, *next(filter(None, changing), [])]


class _Remedies:
    """Combinations of remedies as points of a lattice, and what they cost."""

    def __init__(self, plan: Plan, room: Limits) -> None:
        self._spec, self._room = plan.spec, room
        rates = sustained(cards.rated(room.card or cards.named(USUAL_CARD)))  # type: ignore[arg-type]
        assert rates is not None
        self._costs = {
            relaxed: Costs(scratch, scratch, rates)
            for relaxed, scratch in ((False, room.scratch_bytes), (True, room.relaxed_scratch))
        }
        self._samples = plan.spec.batch_size * room.micro_steps
        samples = None if room.has_global_batch else self._samples
        may_undo = room.host_bytes is not None and plan.host_bytes > room.host_bytes
        workspace = sum(stored_bytes(ref) for ref in plan.persistent.values() if ref.space == "workspace")
        counts = workspace * plan.spec.memory.attention_chunks > MUCH * room.free_bytes
        self.usual = frames(plan.spec, may_relax=counts and room.relaxed_scratch is not None)
        self._frames: list[tuple[Remedy, Remedy]] = []  # of numbers, and of levels
        self._axes = axes(plan.spec, samples, may_undo=may_undo, may_host=not room.in_one)
        self._known: dict[Point, Cost | None] = {}
        self._enough: Point | None = None  # on each axis, as far as the first that was found
        self._limits = {
            "free_bytes": room.free_bytes,
            "free_host_bytes": UNKNOWN if room.host_bytes is None or room.in_one else max(room.host_bytes, 0),
        }

    def best(self, frames: Sequence[Remedy], count: int, within_s: float = math.inf) -> list[Setting]:
        """The fastest that fit, at any level."""
        start = len(self._frames)
        self._frames += product(frames, levels(self._spec))
        low, high = (0,) * len(self._axes), self._enough or tuple(len(axis) - 1 for axis in self._axes)
        boxes: list[Box] = [((frame, *low), (frame, *high)) for frame in range(start, len(self._frames))]
        points = fastest(boxes, self._cost_at, self._fits, **self._limits, within_s=within_s)
        found = [point for point, _ in islice(points, count)]
        self._enough = self._enough or next((point[1:] for point in found), None)
        return [self._setting(point) for point in found]

    def _setting(self, point: Point) -> Setting:
        cost, changes = self._cost_at(point), dict[str, Any]()
        assert cost is not None
        for remedy in self._remedies(point):
            changes |= remedy.options
        spec = self._spec
        text = spec.seq_len - spec.adapters.num_virtual
        mark = MARK if (numbers := self._frames[point[0]][0]).options and not numbers.relaxed else ""
        return Setting(changes, cost, self._samples * text * spec.sharding.size, mark)

    def _remedies(self, point: Point) -> list[Remedy]:
        """Those of a point: its level, those of axes, and what changes numbers."""
        numbers, level = self._frames[point[0]]
        return [level, *(axis[index] for axis, index in zip(self._axes, point[1:], strict=True)), numbers]

    def _cost_at(self, point: Point) -> Cost | None:
        if point not in self._known:
            self._known[point] = self._cost(point)
        return self._known[point]

    def _cost(self, point: Point, *, whole: bool = False) -> Cost | None:
        """The cost of a point; None for what cannot be combined."""
        spec: Spec = self._spec
        for remedy in self._remedies(point):
            spec = remedy.of(spec)
        if spec.batch_size * spec.seq_len % spec.memory.head_chunks:
            spec = replace(spec, memory=replace(spec.memory, head_chunks=1))
        costs = self._costs[self._frames[point[0]][0].relaxed]
        steps = 1 if spec.memory.fused else self._samples // spec.batch_size
        try:
            if whole or spec.config.num_layers <= FEW_LAYERS:
                costs.plan(spec)
            cost = costs.of(spec, steps)
        except UsageError:
            return None
        cost = replace(cost, seconds=cost.seconds * self._samples / (steps * spec.batch_size))
        if self._room.in_one:
            return replace(cost, num_bytes=cost.num_bytes + cost.host_bytes, host_bytes=0)
        return cost

    def _fits(self, point: Point) -> bool:
        """Whether a point fits, by a plan of the whole where an estimate is not enough."""
        cost = self._cost_at(point)
        assert cost is not None
        if cost.num_bytes > SURE * self._room.free_bytes:
            cost = self._known[point] = self._cost(point, whole=True)
        return cost is not None and not cost.missing(**self._limits)
