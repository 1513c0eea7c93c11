"""Where the time of a step goes (`--profile`): a mark before and after each call, on its lane.

Steps that are profiled are launched call by call, without graphs, from the same launches with the same waits, so they
have the same bits. On a GPU marks are events on the streams of the lanes, which the host does not wait for until the
step is over; where the GPU is faster than Python launches, its lanes have gaps that other steps do not have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmq.backends import Launch, Run
from llmq.data.batches.batch import Batch
from llmq.engine.engine import Engine, StepResult
from llmq.engine.measure import Clock
from llmq.ops.record import Call, together
from llmq.plan.names import storage_name
from llmq.tensor import Ref, stored_bytes

DATA, HOST, LAUNCH = "waiting for data", "host", "launches"  # rows beside those of the lanes
Span = tuple[str, int, float, float]  # row, number of what it shows, start and length in microseconds


class Profile:
    """What is known of the steps that are profiled: `shown` are names with arguments, `spans` when they took place, in
    microseconds after `epoch`, which is in seconds since 1970 by the clock of the host."""

    def __init__(self, clock: Clock) -> None:
        self.shown: list[dict[str, Any]] = []
        self.spans: list[Span] = []
        self._clock = clock
        self._marks: list[tuple[str, int, Any, Any]] = []  # of calls, until `settle`
        self.epoch, self._zero = time.time(), time.perf_counter()
        self.start()

    def start(self) -> None:
        """Finds the time of a mark, while the device is idle."""
        base = self._clock.mark()
        self._clock.elapsed_ms(base, base)
        self._base, self._began = base, time.perf_counter()

    def settle(self) -> None:
        """Turns the marks so far into spans, once the device has passed them."""
        for row, number, start, end in self._marks:
            at = 1e-3 * self._clock.elapsed_ms(self._base, start)
            self._add(row, number, self._began + at, 1e-3 * self._clock.elapsed_ms(start, end))
        self._marks.clear()

    def show(self, name: str, **arguments: Any) -> int:
        """The number of something to show."""
        self.shown.append({"name": name, "args": arguments})
        return len(self.shown) - 1

    @contextmanager
    def during(self, name: str, row: str = HOST) -> Iterator[None]:
        """Something that the host does."""
        began = time.perf_counter()
        yield
        self.add(name, began, row)

    def add(self, name: str, began: float, row: str = HOST, seconds: float | None = None) -> None:
        """Something that the host has done since a moment, or for some seconds."""
        self._add(row, self.show(name), began, time.perf_counter() - began if seconds is None else seconds)

    def _add(self, row: str, number: int, began: float, seconds: float) -> None:
        self.spans.append((row, number, 1e6 * (began - self._zero), 1e6 * seconds))

    def marked(self, calls: Sequence[Call], launches: Sequence[Launch]) -> list[Launch]:
        """Launches with marks around each, and around all collectives that are made as one."""
        found = [launch._replace(is_python=True) for launch in launches]  # in no graph
        for indices in together(calls):
            first, last = indices[0], indices[-1]
            before, after = self._around(calls[first : last + 1])
            found[first] = found[first]._replace(before=(before, *found[first].before))
            found[last] = found[last]._replace(after=(*found[last].after, after))
        return found

    def _around(self, calls: Sequence[Call]) -> tuple[Callable[[], None], Callable[[], None]]:
        name = calls[0].op if len(calls) == 1 else f"{len(calls)} x {calls[0].op}"
        number, lane, began = self.show(name, **_arguments(calls)), calls[0].lane, list[Any]()

        def before() -> None:
            began[:] = [self._clock.mark(), time.perf_counter()]

        def after() -> None:
            mark, at = began
            self._marks.append((lane, number, mark, self._clock.mark()))
            if self._clock.is_queued:  # else the host computes it itself
                self._add(LAUNCH, number, at, time.perf_counter() - at)

        return before, after


def _arguments(calls: Sequence[Call]) -> dict[str, Any]:
    """Layer, phase, and the tensors of calls that are made as one."""
    written = [ref for call in calls for ref in call.written]
    read = [ref for call in calls for ref in call.inputs if ref is not None]
    layer = next((ref.layer for ref in (*written, *read) if ref.layer is not None), None)
    about = {} if layer is None else {"layer": layer}
    return {**about, "phase": calls[0].phase, "written": _sizes(written), "read": _sizes(read)}


def _sizes(refs: Sequence[Ref]) -> dict[str, str]:
    """`16x64 bf16, 2,048 bytes` by the name of a tensor's storage."""
    return {
        storage_name(ref): f"{'x'.join(map(str, ref.shape))} {ref.form.key if ref.form else ref.dtype}, "
        f"{stored_bytes(ref):,} bytes"
        for ref in refs
    }


class Profiled(Engine):
    """What an engine has beside its own where steps are profiled: those with a `profile`. Others run as ever."""

    profile: Profile | None = None

    def begin(self, profile: Profile | None) -> None:
        """From here on programs run with the marks of a profile, or with None as ever."""
        if self.profile is not profile:
            self.profile, self._marked = profile, dict[int, Run]()

    def micro_step(self, batch: Batch, *, first: bool = True, last: bool = True) -> None:
        """As of any engine."""
        if (profile := self.profile) is None:
            return super().micro_step(batch, first=first, last=last)
        waited = 1e-3 * batch.wait_ms
        profile.add("waiting for data", time.perf_counter() - waited, DATA, waited)
        with profile.during("micro-step"):
            return super().micro_step(batch, first=first, last=last)

    def update(self, step: int, learning_rate: float, request: int = 0) -> StepResult:
        """As of any engine; the host waits for the device at its end."""
        if (profile := self.profile) is None:
            return super().update(step, learning_rate, request)
        with profile.during("update"):
            return super().update(step, learning_rate, request)

    def run(self, name: str) -> None:
        """A program, with its marks while there is a profile."""
        if (profile := self.profile) is None:
            return super().run(name)
        program = self.plan.programs[name]
        with self._explained():
            if id(program) not in self._marked:
                launches = profile.marked(program.calls, self._bound(name, self._ops))
                self._marked[id(program)] = self._backend.program(launches)
            return self._marked[id(program)]()
