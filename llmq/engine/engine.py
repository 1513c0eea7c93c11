"""The engine of training: what its loop asks of a plan on memory."""

import math
from dataclasses import dataclass

import numpy as np

from llmq.data.batches.batch import Batch
from llmq.engine.stored import TrainedPlan
from llmq.engine.token_sums import TokenSums
from llmq.model.rope import document_positions
from llmq.plan.observe import FIELDS, STRIDE
from llmq.plan.plan import SCALE_STRIDE
from llmq.stores.sharded import SENT_ERROR

WARM_UP_PASSES = 8  # fp8 scales settle in about as many passes as a layer has matmuls in a chain
SETTLED = 0.05  # relative change of every scale between two passes
MICRO_STEPS = {(True, True): "only", (True, False): "first", (False, False): "middle", (False, True): "last"}


@dataclass(frozen=True)
class StepResult:
    """A finished optimizer step: mean loss per trained token, norm of its gradient, whether it was applied, and the
    largest `request` of all ranks. `sent_error` is |sent - gradient| / |gradient| of the compressed gradients that this
    rank has sent, None if it sends none; `accuracy` that of `TokenSums`."""

    loss: float
    norm: float
    num_tokens: int
    applied: bool
    request: int = 0
    sent_error: float | None = None
    accuracy: float | None = None

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are; else the step is not applied."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Engine(TrainedPlan):
    """Trains by the programs of a plan. All arrays passed in and out are on the host."""

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
        if self._has(agreed.request):
            self._fill(cells.request, request)
        self.change("update")
        found = self._numbers(agreed, "loss", "tokens", "norm", "apply", "request", "hits")
        sent_error = None
        if self._has(SENT_ERROR):
            _, power, noise, *_ = (float(value) for value in self.read(SENT_ERROR))
            sent_error = math.sqrt(noise / power) if power else 0.0
        tokens, hits = max(found["tokens"], 1.0), found.get("hits")
        about = (int(found["tokens"]), found["apply"] != 0, int(found.get("request", request)), sent_error)
        return StepResult(found["loss"] / tokens, found["norm"], *about, None if hits is None else hits / tokens)

    def warm_up(self, batch: Batch) -> int:
        """Where delayed scales have seen no batch yet, repeats this one without updating until none changes any more;
        returns the passes it took."""
        if not (self._is_cold and self.plan.scales):
            return 0
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

    def evaluate(self, batch: Batch) -> TokenSums:
        """The sums over the tokens of a batch."""
        self.gather()
        self.feed(batch)
        self.run("evaluate")
        return TokenSums.of(self._numbers(self._cells.evaluated, "loss", "tokens", "hits"))

    def change(self, name: str) -> None:
        """Runs a program of the plan that changes weights, which of many ranks are then no longer whole."""
        self.run(name)
        self._is_gathered = False

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
