"""The null backend: it computes nothing and notes what each call writes and reads.

`Recorder` is given to model code in place of a backend. `Backward(recorder)` notes calls as part of the backward pass,
`Replay(recorder)` those of a forward pass that is run again within it: all of them, of which the plan keeps those that
make what was dropped (llmq/plan/passes/fates.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from llmq.ops.seam import record
from llmq.protocols import Ops
from llmq.tensor import Form, Ref, changed


@dataclass(frozen=True)
class Result:
    """What a call writes. The plan decides the rest: the `forms` of the value that are wanted (none if it is not read),
    whether it is added to what is there, and the cells that collect the largest magnitude, by name."""

    ref: Ref
    forms: tuple[Form | None, ...] = ()
    accumulate: bool = False
    amax: tuple[str, ...] = ()

    @cached_property
    def refs(self) -> tuple[Ref, ...]:
        """A Ref for each wanted form."""
        return tuple(self.ref if form is self.ref.form else changed(self.ref, form=form) for form in self.forms)


@dataclass(frozen=True)
class Call:
    """One call of an op: `phase` is forward, replay, backward or update.

    It runs on a lane, in order with the other calls there, after the calls of other lanes whose indices are in `waits`.
    """

    op: str
    outputs: tuple[Result | None, ...]
    inputs: tuple[Ref | None, ...]
    numbers: Mapping[str, Any]
    phase: str
    lane: str = "main"
    waits: tuple[int, ...] = ()

    @cached_property
    def written(self) -> tuple[Ref, ...]:
        """Everything that it writes, a Ref for each form."""
        return tuple(ref for result in self.outputs if result is not None for ref in result.refs)

    @property
    def collective(self) -> str:
        """The op of a collective, "" of any other call."""
        return self.op if record(self.op).is_collective else ""


def together(calls: Iterable[Any]) -> Iterator[list[int]]:
    """The indices of each call, and of collectives of one op and lane that follow each other, which may be made as one:
    these do not read what the others write; a gather after a sum reads the sum. What is made of calls goes, too: it has
    a `lane` and names its `collective`."""
    for _, found in groupby(enumerate(calls), key=lambda each: (each[1].lane, each[1].collective or each[0])):
        yield [index for index, _ in found]


def call_of(
    op: str, outputs: tuple[Ref | None, ...], inputs: tuple[Ref | None, ...], numbers: Mapping[str, Any], phase: str
) -> Call:
    """A call as recorded, on the lane of its op."""
    results = tuple(None if ref is None else Result(ref) for ref in outputs)
    return Call(op, results, inputs, numbers, phase, lane=record(op).lane)


@dataclass
class Recorder(Ops):
    """Notes calls in order. Arguments are Refs; a call with nothing to write (all outputs None) is not made."""

    phase: str = "forward"
    calls: list[Call] = field(default_factory=list)

    @property
    def recorder(self) -> Recorder:
        """Itself: what all phases of a program are noted by."""
        return self

    def __getattr__(self, op: str) -> Callable[..., None]:
        if op.startswith("__"):
            raise AttributeError(op)  # what copying and printing ask for
        return self.noting(op, self.phase)

    def noting(self, op: str, phase: str) -> Callable[..., None]:
        """What notes a call of `op` in a phase."""
        count = len(record(op).outputs)

        def call(*arguments: Ref | None, **numbers: Any) -> None:
            outputs = arguments[:count]
            if any(ref is not None for ref in outputs):
                self.calls.append(call_of(op, outputs, arguments[count:], numbers, phase))

        return call


class Backward(Ops):
    """Calls of the backward pass, noted by the recorder of the forward pass."""

    phase = "backward"

    def __init__(self, ops: Any) -> None:
        self.recorder: Recorder = ops.recorder

    def __getattr__(self, op: str) -> Callable[..., None]:
        return self.recorder.noting(op, self.phase)


class Replay(Backward):
    """The same forward, run in backward."""

    phase = "replay"
