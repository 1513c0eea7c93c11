"""An engine that finds out what made a step not finite (`--debug-nan`).

A step whose loss or gradient is not finite has changed no weight, and its random bits have addresses: made again from
the same micro-batches it has the same bits. So it is made once more, and after each call what it has written is looked
at. Until then the engine does what others do, and keeps the micro-batches of the step.

The looks are launches beside those of the plan: each comes after its call, on its lane, and those of collectives that
are made as one after all of them. The update is made up to the call that decides that it is not applied.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from llmq.backends import Backend, BackendMemory, Launch, Op
from llmq.data.batches.batch import Batch
from llmq.engine.bound_plan import Binder
from llmq.engine.engine import Engine, StepResult
from llmq.ops.record import Call
from llmq.plan.names import storage_name
from llmq.plan.plan import Plan, Scratch
from llmq.tensor import Ref, stored_dtype

# By the dtype of a tensor's bytes: the bits that are all set in what is not finite, as an integer of that size.
ALL_ONES: Mapping[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "float64": (np.uint64, 0x7FF << 52),
    "float32": (np.uint32, 0xFF << 23),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
    "float8_e5m2": (np.uint8, 0x7C),
    "float8_e4m3fn": (np.uint8, 0x7F),
}
LOOKED_AT = 1 << 22  # elements at a time: a look takes memory beside the plan's


class Bad(NamedTuple):
    """The first call whose output is not finite: its place in the step, which is the same for all ranks; whether what
    it read was finite; the rank that has found it; and words. The smallest of several is the cause."""

    program: int
    call: int
    is_source: bool
    rank: int
    words: str


def num_bad(array: Any, dtype: np.dtype) -> int:
    """How many elements of an array of NumPy or CuPy, whose bytes are of `dtype`, are infinite or NaN."""
    if dtype.name not in ALL_ONES or not array.size:
        return 0
    kind, ones = ALL_ONES[dtype.name]
    some, mask = max(1, LOOKED_AT * len(array) // array.size), kind(ones)  # rows
    found = [((array[at : at + some].view(kind) & mask) == mask).sum() for at in range(0, len(array), some)]
    return int(sum(found))  # waits for what the call's lane has done


@dataclass
class _Search:
    """What is looked for in the programs of a step, in turn."""

    rank: int
    found: Bad | None = None
    program: int = 0
    micro_step: str = ""


class _CheckedBinder(Binder):
    """Looks at the outputs of each call, until one is found that is not finite."""

    def __init__(self, plan: Plan, name: str, memory: BackendMemory, search: _Search) -> None:
        super().__init__(plan, name, memory)
        self._search = search

    def checked(self, ops: Mapping[str, Op], scratch_bytes: Scratch | None) -> list[Launch]:
        """The launches, each with its look."""
        made = self.launches(ops, scratch_bytes, poison=False)
        looks = (partial(self._look, index, call) for index, call in enumerate(self.program.calls))
        return [each._replace(after=(*each.after, look)) for each, look in zip(made, looks, strict=True)]

    def _look(self, index: int, call: Call) -> None:
        if self._search.found is not None:
            return
        for ref in call.written:
            if bad := self._bad(ref):
                search, read = self._search, ", ".join(self._bad_inputs(call))
                words = f"{self._place(call, ref)}: {bad:,} of {math.prod(ref.shape):,} numbers are not finite"
                words += f"; so is what it read: {read}" if read else "" if call.collective else ", made of finite ones"
                search.found = Bad(search.program, index, not read, search.rank, words)
                return

    def _bad(self, ref: Ref) -> int:
        """How many numbers of a tensor are bad; 0 of one that is filled in no order that Python sees."""
        return num_bad(self._array(ref), stored_dtype(ref)) if ref.home in self._memory.homes_in_order else 0

    def _place(self, call: Call, ref: Ref) -> str:
        layer = "" if ref.layer is None else f" of layer {ref.layer}"
        copy = f" in {ref.form.key}" if ref.form is not None else ""
        rank = f" on rank {self._search.rank}" if self._search.rank else ""
        name = ref.name.split("/", 1)[-1]  # without the micro-step of the plan
        return f"first in {call.op} ({call.phase}{self._search.micro_step}){rank}: {name}{copy}{layer}"

    def _bad_inputs(self, call: Call) -> list[str]:
        """Names of inputs that were not finite before, of those that the call has not overwritten."""
        written = {self._at(ref) for ref in call.written}
        refs = [ref for ref in call.inputs if ref is not None and self._at(ref) not in written]
        return [ref.name for ref in refs if self._bad(ref)]

    def _at(self, ref: Ref) -> Any:
        storage = storage_name(ref)
        place = self.program.places.get(storage)
        return storage if place is None else (place.home, place.offset)


class CheckedEngine(Engine):
    """`bad` is what was found of the last step that was not finite."""

    def __init__(self, plan: Plan, backend: Backend, **about: Any) -> None:
        super().__init__(plan, backend, **about)
        self.bad: Bad | None = None
        self._batches: list[Batch] = []
        self._search: _Search | None = None

    def micro_step(self, batch: Batch, *, first: bool = True, last: bool = True) -> None:
        """As of any engine; the batches of a step are kept."""
        self._batches = [*([] if first else self._batches), batch]
        super().micro_step(batch, first=first, last=last)

    def update(self, step: int, learning_rate: float, request: int = 0) -> StepResult:
        """As of any engine; `bad` is what a step is not finite for."""
        done = super().update(step, learning_rate, request)
        if self.plan.spec.memory.fused and math.isfinite(done.loss) and not done.is_finite:
            # Rows whose own gradient is finite have been updated: made again, the step would be another one.
            self.bad = Bad(0, 0, True, 0, "the gradient alone is not finite: without --fused-update it is said where")
        else:
            self.bad = None if done.is_finite else self._find(self._batches)
        return done

    def run(self, name: str) -> None:
        """A program, with its looks while something is searched for."""
        if self._search is None:
            super().run(name)
        else:
            self._run_checked(name, self.plan.programs[name].calls)

    def _find(self, batches: Sequence[Batch]) -> Bad | None:
        self._search = search = _Search(self._backend.world.rank)
        amax = self.read(self._cells.amax) if self.plan.scales else None  # of the weights that the update has written
        for number, batch in zip(count(1), batches, strict=False):
            search.micro_step = f" of micro-batch {number}" if len(batches) > 1 else ""
            super().micro_step(batch, first=number == 1, last=number == len(batches))
        search.micro_step = ""
        self._run_checked("update", self._before_applying())
        self._search, self._batches = None, []
        if amax is not None:
            self.write(self._cells.amax, amax)
        return search.found

    def _before_applying(self) -> Sequence[Call]:
        """The calls of the update up to the one that decides whether it is applied."""
        calls, apply = self.plan.programs["update"].calls, self._cells.apply
        return calls[: 1 + next(i for i, call in enumerate(calls) if apply in call.written)]

    def _run_checked(self, name: str, calls: Sequence[Call]) -> None:
        assert self._search is not None
        scratch_bytes = self._backend.scratch_bytes if self._backend.takes_scratch else None
        binder = _CheckedBinder(self.plan, name, self._memory, self._search)
        with self._explained():
            self._backend.program(binder.checked(self._ops, scratch_bytes)[: len(calls)])()
        self._search.program += 1
