"""The engine of training: what its loop asks of a plan on memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmq.backends import Backend
from llmq.data.batches.batch import Batch
from llmq.engine.stored import StoredPlan
from llmq.model.held import Values
from llmq.model.rope import document_positions, rope_table
from llmq.plan.observe import FIELDS, STRIDE
from llmq.plan.plan import SCALE_STRIDE, Plan
from llmq.row import Row
from llmq.stores.sharded import SENT_ERROR

WARM_UP_PASSES = 8  # fp8 scales settle in about as many passes as a layer has matmuls in a chain
SETTLED = 0.05  # relative change of every scale between two passes
MICRO_STEPS = {(True, True): "only", (True, False): "first", (False, False): "middle", (False, True): "last"}


@dataclass(frozen=True)
class StepResult:
    """A finished optimizer step: mean loss per trained token, norm of its gradient, whether it was applied, and the
    largest `request` of all ranks. `sent_error` is |sent - gradient| / |gradient| of the compressed gradients that this
    rank has sent, None if it sends none."""

    loss: float
    norm: float
    num_tokens: int
    applied: bool
    request: int = 0
    sent_error: float | None = None


class Engine(StoredPlan):
    """Trains by the programs of a plan. All arrays passed in and out are on the host."""

    def __init__(self, plan: Plan, backend: Backend, **about: Any) -> None:
        super().__init__(plan, backend, **about)
        self._is_gathered = False  # whether all weights are whole; of one rank they are
        self._is_cold = True  # whether delayed scales have seen no batch yet
        self._fill_constants()

    # parameters

    def load(self, parameters: Iterable[tuple[Row, Values]]) -> None:
        """Sets masters from whole parameters (padded, any float dtype) and makes all copies; moments become zero."""
        self._set(parameters, self.plan.rows)
        for name in self.plan.moment_names:
            self._memory.fill(name, 0)
        self._is_cold = True
        self.change("publish")

    # training

    def micro_step(self, batch: Batch, *, first: bool = True, last: bool = True) -> None:
        """Forward and backward of one micro-batch.

        The first micro-step of an optimizer step overwrites gradients and sums, the others add; after the last one the
        gradients are whole. A plan with noise needs the `places` of the batch.
        """
        assert batch.places is not None or not self._has(self._cells.batch.samples), "noise goes by a sample's place"
        # Programs add to it, also those of later micro-steps.
        if first and self._has(SENT_ERROR):
            self._fill(SENT_ERROR, 0)
        self.feed(batch)
        self.run(MICRO_STEPS[first, last])
        self._is_gathered = self._is_gathered or first

    def start_step(self, step: int, learning_rate: float) -> None:
        """Before the micro-steps of a step whose weights may be updated in backward; `update` ends it with the same."""
        if self.plan.spec.memory.fused:
            self._begin_update(step, learning_rate)

    def _begin_update(self, step: int, learning_rate: float) -> None:
        self._fill(self._cells.step, step)
        self._fill(self._cells.learning_rate, learning_rate)

    def update(self, step: int, learning_rate: float, request: int = 0) -> StepResult:
        """The optimizer step number `step`, counted from 1. Nothing changes if loss or gradient is not finite.

        `request` is what this rank wants of all after the step; the result has the largest one.
        """
        cells, agreed = self._cells, self._cells.agreed
        if not self.plan.spec.memory.fused:
            self._begin_update(step, learning_rate)
        if is_asked := self._has(agreed.request):
            self._fill(cells.request, request)
        self.change("update")
        asked = [agreed.request] if is_asked else []
        loss, tokens, norm, applied, *largest = self._read_scalars(
            agreed.loss, agreed.tokens, cells.norm, cells.apply, *asked
        )
        about = (int(largest[0]) if is_asked else request, self._sent_error())
        return StepResult(loss / max(tokens, 1.0), norm, int(tokens), applied != 0, *about)

    def _sent_error(self) -> float | None:
        """Relative error of the gradients that this rank has sent since the step began."""
        if not self._has(SENT_ERROR):
            return None
        _, power, noise, *_ = (float(value) for value in self.read(SENT_ERROR))
        return math.sqrt(noise / power) if power else 0.0

    @property
    def needs_warm_up(self) -> bool:
        """Whether delayed scales exist that a first batch has to set."""
        return self._is_cold and bool(self.plan.scales)

    def warm_up(self, batch: Batch) -> int:
        """Repeats a micro-batch without updating until no scale changes any more; returns the passes it took."""
        cells, self._is_cold = self._cells, False
        for count in range(1, WARM_UP_PASSES + 1):
            before = self.read(cells.scales)
            self.run("publish_counted")
            self.micro_step(batch)
            self._fill(cells.history, 0)
            self.run("calibrate")
            newest, after = self.read(cells.history)[0], self.read(cells.scales)  # what all ranks have seen
            self.change("publish")
            if newest[::SCALE_STRIDE].all() and np.all(np.abs(after - before) <= SETTLED * before):
                return count
        return WARM_UP_PASSES

    # reading

    def observe(self, batch: Batch) -> np.ndarray:
        """Six numbers for every copy in `plan.observed`, (copies, 6): see the op `quantization_error`.

        One forward and backward of a micro-batch at the start of an optimizer step, whose first micro-step overwrites
        what it leaves; scales and their statistics do not change.
        """
        self._fill(self._cells.quantization_error, 0)
        self.gather()
        self.feed(batch)
        self.run("observe")
        return self.read(self._cells.quantization_error).reshape(-1, STRIDE)[:, :FIELDS]

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Sum of losses and number of trained tokens of a batch."""
        self.gather()
        self.feed(batch)
        self.run("evaluate")
        loss, tokens = self._read_scalars(self._cells.evaluated.loss, self._cells.evaluated.tokens)
        return loss, int(tokens)

    def change(self, name: str) -> None:
        """Runs a program of the plan that changes weights, which of many ranks are then no longer whole."""
        self.run(name)
        self._is_gathered = False

    def gather(self) -> None:
        """Makes the weights whole, if they were updated since a step made them so. All ranks ask for it."""
        # One rank has no such program: its update writes whole weights.
        if not self._is_gathered and "gather" in self.plan.programs:
            self.run("gather")
        self._is_gathered = True

    def restore(self, read: Callable[..., np.ndarray], frozen: Iterable[tuple[Row, np.ndarray]] = ()) -> None:
        """Sets the state from `read(name)`, and the `frozen` rows, which it lacks, as `StoredPlan` does; makes all
        copies of the weights."""
        self._restore(read, frozen)
        self._is_cold = False
        self.change("publish")

    def feed(self, batch: Batch) -> None:
        """The batch in its slots, with the positions of its tokens."""
        spec, slots = self.plan.spec, self._cells.batch
        self.write(slots.tokens, batch.tokens)
        self.write(slots.targets, batch.targets)
        if batch.places is not None and self._has(slots.samples):
            self.write(slots.samples, batch.places.astype(np.int32))  # modulo 2^32
        assert (batch.borders is None) == (spec.packing is None), "rows have borders where the plan has them"
        if batch.borders is None or spec.packing is None:
            return
        marks = np.full((len(batch.tokens), spec.packing.max_docs + 1), spec.seq_len, np.int32)
        marks[:, : batch.borders.shape[1]] = batch.borders
        self.write(slots.borders, marks)
        self.write(slots.positions, document_positions(marks, spec.seq_len))

    def _fill_constants(self) -> None:
        spec, cells = self.plan.spec, self._cells
        self.write(cells.rope, rope_table(spec.config.rope, spec.config.head_dim, spec.seq_len, np.float64))
        self.write(cells.batch.positions, np.broadcast_to(np.arange(spec.seq_len), cells.batch.positions.shape))
        for ref in self.plan.persistent.values():
            if ref.space == "scale":
                self._fill(ref, 1 if ref.shape == (1,) or ref.name == "scales" else 0)
        for cell in (cells.norm, cells.last_norm):
            if self._has(cell):
                self._fill(cell, 0)
        for name, cell in self.plan.tracked.cells.items():
            self._fill(cell, self.plan.tracked.first[name])
        if self.plan.scales:
            self.write(cells.limits, np.array(self.plan.limits))
            self._fill(cells.always, 1)
