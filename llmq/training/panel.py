"""The panel of a run on a terminal: the newest numbers of its log, and the course of the loss, above the bars.

It follows the log's records, and the screen asks it for its lines at every drawing. Fields have one width, so that
numbers change in place; how many stand side by side is up to the terminal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from llmq.disk import GIB, MIB, shown
from llmq.hardware import nvml

if TYPE_CHECKING:
    from rich.text import Text

FIELD, GAP = 18, 2  # columns of a field and between two
MOST_POINTS = 512  # of the loss's course: of more, neighbours become one
MOST_METRICS = 24  # numbers of callbacks that are shown
LEVELS = {True: "▁▂▃▄▅▆▇█", False: "_.-~=+*#"}  # of the sparkline, where the terminal has Unicode or not
READ_S = 2.0  # from one reading of the GPU to the next

Fields = Iterator[tuple[str, str]]  # names and values


class Curve:
    """The course of a number over a whole run, in at most MOST_POINTS means of as many values each."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._each, self._sum, self._count = 1, 0.0, 0

    def add(self, value: float) -> None:
        """The next value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._each:
            return
        self.points.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.points) == MOST_POINTS:
            self.points = [sum(pair) / 2 for pair in zip(self.points[::2], self.points[1::2], strict=True)]
            self._each *= 2

    def spark(self, width: int, levels: str) -> str:
        """At most `width` letters, each the mean of some points, from the lowest of `levels` to the highest."""
        count, points = min(width, len(self.points)), self.points
        ends = [len(points) * i // count for i in range(count + 1)] if count else []
        means = [sum(points[a:b]) / (b - a) for a, b in pairwise(ends)]
        low, high = min(means, default=0.0), max(means, default=0.0)
        step = (high - low) / (len(levels) - 1) or 1.0
        return "".join(levels[round((value - low) / step)] for value in means)


class Panel:
    """What is shown of a run on the GPU with this `uuid` (None: of no GPU); `gpu_bytes` are those of its memory."""

    def __init__(self, uuid: str | None, gpu_bytes: int | None, *, has_unicode: bool) -> None:
        self._uuid, self._gpu_bytes, self._levels = uuid, gpu_bytes, LEVELS[has_unicode]
        self._newest: dict[str, Mapping[str, Any]] = {}  # by the type of the record
        self._metrics: dict[str, float] = {}
        self._loss, self._best = Curve(), math.inf
        self._reading: nvml.Background | None = None
        self._read_at = -math.inf

    def take(self, record: Mapping[str, Any] | None) -> None:
        """The next record of the log; None ends it."""
        kind = record.get("type", "") if record else ""
        if record and kind == "metrics":
            self._metrics |= {name: float(value) for name, value in record["values"].items() if value is not None}
        elif record and kind in ("train", "eval", "gpu"):
            self._newest[kind] = record
        if record and kind == "train":
            self._loss.add(float(record["loss"]))
        elif record and kind == "eval":
            self._best = min(self._best, float(record["loss"]))

    def lines(self, width: int) -> Iterator[Text]:
        """The panel, no wider than `width`; nothing before the first step."""
        from rich.text import Text

        if "train" not in self._newest:
            return
        if points := self._loss.points:
            first, last = f"{points[0]:.4g} ", f" {points[-1]:.4g}"
            spark = self._loss.spark(max(width - len(first) - len(last) - 6, 1), self._levels)
            yield Text.assemble(("loss ", "dim"), first, (spark, "cyan"), last, no_wrap=True, overflow="crop")
        metrics = ((name, f"{value:.5g}") for name, value in list(self._metrics.items())[:MOST_METRICS])
        for size, fields in ((FIELD, [*self._fields()]), (2 * FIELD + GAP, [*metrics])):
            across = max((width + GAP) // (size + GAP), 1)
            for start in range(0, len(fields), across):
                line = Text(no_wrap=True, overflow="crop")
                for name, value in fields[start : start + across]:
                    room = size - len(value) - 1
                    line.append(" " * GAP * bool(line))
                    line.append(f"{name[:room]:<{room}} " if room > 0 else "", "dim").append(value[:size], "bold")
                yield line

    def _fields(self) -> Fields:
        step, held_out = self._newest["train"], self._newest.get("eval")
        yield "loss", f"{float(step['loss']):.4f}"
        if held_out is not None:
            yield "evaluation", f"{float(held_out['loss']):.4f}"
            yield "best", f"{self._best:.4f}"
        for name, record in {"accuracy": step, "eval acc.": held_out}.items():
            if record is not None and record.get("accuracy") is not None:
                yield name, f"{100 * record['accuracy']:.1f}%"
        yield "tokens/s", f"{float(step['tps']):,.0f}"
        if step["sol"] is not None:
            yield "sol", f"{100 * float(step['sol']):.1f}%"
        yield "lr", f"{float(step['lr']):.2e}"
        yield "norm", f"{float(step['norm']):.4g}"
        if step["memory_mib"] is not None:
            taken = int(step["memory_mib"] * MIB)
            yield "memory", f"{taken / GIB:.1f}/{self._gpu_bytes / GIB:.0f} GiB" if self._gpu_bytes else shown(taken)
        if step.get("allocated_mib") is not None:
            yield "allocated", shown(int(step["allocated_mib"] * MIB))
        yield from self._gpu()

    def _gpu(self) -> Fields:
        """The newest reading: that of --log-gpu-util, or one of the panel's own."""
        found = self._newest.get("gpu") or self._read()
        units = {"sm_mhz": ("clock", " MHz"), "watts": ("power", " W"), "celsius": ("temperature", " C")}
        for key, (name, unit) in {**units, "gpu_percent": ("busy", "%")}.items():
            if (value := found.get(key)) is not None:
                yield name, f"{float(value):.0f}{unit}"
        if found.get("throttled"):
            yield "held by", ", ".join(found["throttled"])

    def _read(self) -> Mapping[str, Any]:
        """What NVML said last; where that is old, it is asked again in a thread of its own, for a later drawing."""
        now = time.monotonic()
        if self._uuid is not None and now - self._read_at >= READ_S:
            found = self._reading.stop() if self._reading else ()
            self._reading, self._read_at = nvml.Background(self._uuid), now
            self._newest["read"] = vars(found[-1]) if found else {}
        return self._newest.get("read", {})
