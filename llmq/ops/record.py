"""The null backend: it computes nothing and notes what each call writes and reads.

`Recorder` is given to model code in place of a backend. `Replay(recorder)` is the same for a forward pass that is run
again in backward: it lets through only the calls whose results were dropped and are still needed (`Recompute`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmq.ops.seam import record
from llmq.tensor import Form, Ref


@dataclass(frozen=True)
class Call:
    """One call of an op: `phase` is forward, replay, backward or update."""

    op: str
    outputs: tuple[Ref | None, ...]
    inputs: tuple[Ref | None, ...]
    numbers: dict[str, Any]
    phase: str


@dataclass(frozen=True)
class Recompute:
    """What backward makes anew: the `dropped` forms by slot; those of slots in `copies` are cast from a kept value."""

    dropped: Mapping[str, frozenset[Form | None]] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()


@dataclass
class Recorder:
    """Notes calls in order. Arguments are Refs; a call with nothing to write (all outputs None) is not made."""

    recompute: Recompute = field(default_factory=Recompute)
    phase: str = "forward"
    calls: list[Call] = field(default_factory=list)

    def __getattr__(self, op: str) -> Callable[..., None]:
        count = len(record(op).outputs)

        def call(*arguments: Ref | None, **numbers: Any) -> None:
            self._note(op, arguments[:count], arguments[count:], numbers, self.phase)

        return call

    def replay(self, op: str, arguments: tuple[Ref | None, ...], numbers: dict[str, Any]) -> None:
        """Notes a forward call again if something it writes was dropped, or the casts that remake dropped copies."""
        count = len(record(op).outputs)
        outputs: list[Ref | None] = []
        for ref in arguments[:count]:
            remade = ref is not None and ref.name in self.recompute.dropped
            second = replace(ref, again=True) if ref is not None and remade else None
            if ref is not None and ref.name in self.recompute.copies:
                self._note("cast", (second,), (ref,), {}, "replay")
                second = None
            outputs.append(second)
        self._note(op, tuple(outputs), arguments[count:], numbers, "replay")

    def _note(
        self,
        op: str,
        outputs: tuple[Ref | None, ...],
        inputs: tuple[Ref | None, ...],
        numbers: dict[str, Any],
        phase: str,
    ) -> None:
        if all(ref is None for ref in outputs):
            return
        if phase in ("replay", "backward"):
            inputs = tuple(self._second_life(ref) for ref in inputs)
        self.calls.append(Call(op, outputs, inputs, numbers, phase))

    def _second_life(self, ref: Ref | None) -> Ref | None:
        if ref is not None and ref.form in self.recompute.dropped.get(ref.name, ()):
            return replace(ref, again=True)
        return ref


class Replay:
    """The same forward, run in backward: calls go to the recorder, which keeps those that somebody needs."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, op: str) -> Callable[..., None]:
        def call(*arguments: Ref | None, **numbers: Any) -> None:
            self._recorder.replay(op, arguments, numbers)

        return call
