"""A plan made flesh: memory allocated, programs bound to a backend, and the few things a training loop asks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from llmq.backends import Backend, Launch, Op, Run
from llmq.data.batches.batch import Batch
from llmq.engine.bind import bind
from llmq.engine.held import held_copy, held_value
from llmq.model.rope import document_positions, rope_table
from llmq.plan.names import scale_ref, storage_name
from llmq.plan.observe import FIELDS, STRIDE
from llmq.plan.plan import SCALE_STRIDE, Plan
from llmq.row import Row
from llmq.tensor import DTYPES, Ref, Tensor

WARM_UP_PASSES = 8  # fp8 scales settle in about as many passes as a layer has matmuls in a chain
SETTLED = 0.05  # relative change of every scale between two passes
MICRO_STEPS = {(True, True): "only", (True, False): "first", (False, False): "middle", (False, True): "last"}


@dataclass(frozen=True)
class StepResult:
    """A finished optimizer step: mean loss per trained token, norm of its gradient, whether it was applied."""

    loss: float
    norm: float
    num_tokens: int
    applied: bool


class Engine:
    """Runs the programs of a plan. All arrays passed in and out are on the host.

    `wrap(name, function) -> function` may be put around every op (timing, checking); `poison` fills activations with
    NaN before their first write and after their last read.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        *,
        wrap: Callable[[str, Op], Op] | None = None,
        poison: bool = False,
    ) -> None:
        self.plan = plan
        self._backend, self._poison, self._cells = backend, poison, plan.cells
        backend.prepare(call for program in plan.programs.values() for call in program.calls)
        self._memory = backend.memory(plan.persistent, {home: plan.arena_bytes(home) for home in ("device", "host")})
        self._ops = {name: wrap(name, op) for name, op in backend.ops.items()} if wrap else backend.ops
        self._programs: dict[int, Run] = {}  # by the id of the plan's program: those that are alike are bound once
        self._fill_constants()

    # parameters

    def load(self, parameters: Iterable[tuple[Row, np.ndarray]]) -> None:
        """Sets masters from whole parameters (padded, any float dtype) and makes all copies; moments become zero."""
        self._set(parameters, self.plan.rows)
        for state in self.plan.moments.values():
            self._fill(state.m, 0)
            self._fill(state.v, 0)
        self.run("publish")

    def parameter(self, name: str) -> np.ndarray:
        """Master of a parameter, or a frozen one itself, padded, in its own dtype (a copy).

        One that is held in a form is given as what that stands for.
        """
        ref = self.plan.held(name)
        if ref.form is None:
            return self._read(ref)
        value = np.empty(ref.shape, DTYPES[ref.dtype])
        for one, target in zip(ref.entries, _entries(ref, value), strict=True):
            copy = Tensor(one.name, self._read(one), one.shape, one.form, self._read(scale_ref(one)))
            target[...] = held_value(copy, one.dtype)
        return value

    def gradient(self, name: str) -> np.ndarray:
        """Gradient of a parameter as accumulated since the step began: a sum over trained tokens (a copy)."""
        return self._read(self.plan.grads[name])

    # training

    def micro_step(self, batch: Batch, *, first: bool = True, last: bool = True) -> None:
        """Forward and backward of one micro-batch.

        The first micro-step of an optimizer step overwrites gradients and sums, the others add; after the last one the
        gradients are whole. A plan with noise needs the `places` of the batch.
        """
        assert batch.places is not None or not self._has(self._cells.batch.samples), "noise goes by a sample's place"
        self.feed(batch)
        self.run(MICRO_STEPS[first, last])

    def update(self, step: int, learning_rate: float) -> StepResult:
        """The optimizer step number `step`, counted from 1. Nothing changes if loss or gradient is not finite."""
        cells = self._cells
        self._fill(cells.step, step)
        self._fill(cells.learning_rate, learning_rate)
        self.run("update")
        loss, tokens, norm, applied = self._read_scalars(cells.loss, cells.tokens, cells.norm, cells.apply)
        return StepResult(loss / max(tokens, 1.0), norm, int(tokens), applied != 0)

    @property
    def needs_warm_up(self) -> bool:
        """Whether delayed scales exist, which a first batch has to set."""
        return bool(self.plan.scales)

    def warm_up(self, batch: Batch) -> int:
        """Repeats a micro-batch without updating until no scale changes any more; returns the passes it took."""
        cells = self._cells
        for count in range(1, WARM_UP_PASSES + 1):
            before = self._read(cells.scales)
            self.run("publish_counted")
            self.micro_step(batch)
            amax = self._read(cells.amax)[::SCALE_STRIDE]
            self._fill(cells.history, 0)
            self.run("calibrate")
            after = self._read(cells.scales)
            self.run("publish")
            if amax.all() and np.all(np.abs(after - before) <= SETTLED * before):
                return count
        return WARM_UP_PASSES

    # reading

    def observe(self, batch: Batch) -> np.ndarray:
        """Six numbers for every copy in `plan.observed`, (copies, 6): see the op `quantization_error`.

        One forward and backward of a micro-batch at the start of an optimizer step, whose first micro-step overwrites
        what it leaves; scales and their statistics do not change.
        """
        self._fill(self._cells.quantization_error, 0)
        self.feed(batch)
        self.run("observe")
        return self._read(self._cells.quantization_error).reshape(-1, STRIDE)[:, :FIELDS]

    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Sum of losses and number of trained tokens of a batch."""
        self.feed(batch)
        self.run("evaluate")
        loss, count = self._read_scalars(self._cells.evaluated.loss, self._cells.evaluated.tokens)
        return loss, int(count)

    def next_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits (V,) f32 of the token after `tokens` (n,), of which the last seq_len are read."""
        spec, prompt = self.plan.spec, self._cells.prompt
        tokens = np.asarray(tokens, np.int32)[-spec.seq_len :]
        padded = np.zeros((1, spec.seq_len), np.int32)
        padded[0, : tokens.size] = tokens
        self._write(prompt.tokens, padded)
        self._fill(prompt.index, tokens.size - 1)
        self.run("generate")
        logits = self._read(self._cells.logits).reshape(-1)[: spec.config.vocab_size]
        return logits if logits.dtype == np.float64 else logits.astype(np.float32)

    # state

    def state(self, into: Callable[[str], np.ndarray] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Name and host copy of everything that a bit-exact resume needs, one at a time; `into(name)` holds a copy."""
        for name in self.plan.state():
            yield name, self._memory.read(name, into and into(name))

    def restore(self, read: Callable[[str], np.ndarray], frozen: Iterable[tuple[Row, np.ndarray]] = ()) -> None:
        """Sets the state from `read(name)`, and the `frozen` rows, which it lacks; makes all copies of the weights."""
        self._set(frozen, [row for row in self.plan.rows if not row.trainable])
        for name in self.plan.state():
            self._memory.write(name, read(name))
        self.run("publish")

    def run(self, name: str) -> None:
        """Runs a program of the plan by name; it is bound on first use."""
        key = id(self.plan.programs[name])
        if key not in self._programs:
            self._programs[key] = self._backend.program(self._bound(name, self._ops, poison=self._poison))
        self._programs[key]()

    def traced(self, name: str, wrap: Callable[[str, Op], Op]) -> Run:
        """A program of the plan, with `wrap` around every op, that runs eagerly whenever it is called; for timing."""
        launches = self._bound(name, {op: wrap(op, function) for op, function in self._ops.items()})
        return lambda: self._backend.program(launches)()

    def part(self, name: str, indices: Iterable[int], before: Run | None = None) -> Run:
        """These calls of a program of the plan, each after `before`, as a program of their own; for timing."""
        launches, first = self._bound(name, self._ops), [] if before is None else [Launch(before)]
        return self._backend.program([each for index in indices for each in (*first, Launch(launches[index].run))])

    def feed(self, batch: Batch) -> None:
        """The batch in its slots, with the positions of its tokens."""
        spec, slots = self.plan.spec, self._cells.batch
        self._write(slots.tokens, batch.tokens)
        self._write(slots.targets, batch.targets)
        if batch.places is not None and self._has(slots.samples):
            self._write(slots.samples, batch.places.astype(np.int32))  # modulo 2^32
        assert (batch.borders is None) == (spec.packing is None), "rows have borders where the plan has them"
        if batch.borders is None or spec.packing is None:
            return
        marks = np.full((len(batch.tokens), spec.packing.max_docs + 1), spec.seq_len, np.int32)
        marks[:, : batch.borders.shape[1]] = batch.borders
        self._write(slots.borders, marks)
        self._write(slots.positions, document_positions(marks, spec.seq_len))

    def _bound(self, name: str, ops: Mapping[str, Op], *, poison: bool = False) -> list[Launch]:
        scratch_bytes = self._backend.scratch_bytes if self._backend.takes_scratch else None
        return bind(self.plan, name, self._memory, ops, scratch_bytes, poison=poison)

    def _has(self, ref: Ref) -> bool:
        """Whether any program reads or writes a tensor."""
        return storage_name(ref) in self.plan.persistent

    def _set(self, parameters: Iterable[tuple[Row, np.ndarray]], expected: Iterable[Row]) -> None:
        """Sets masters, or what is held of frozen rows, from the values of all `expected` rows."""
        missing = {row.name for row in expected}
        for row, values in parameters:
            ref = self.plan.held(row.name)
            if ref.form is None:
                self._write(ref, values)
            else:
                for one, value in zip(ref.entries, _entries(ref, values), strict=True):
                    numbers, scale = held_copy(one, value)
                    self._write(one, numbers)
                    self._write(scale_ref(one), scale)
            missing.discard(row.name)
        assert not missing, f"parameters not given: {sorted(missing)}"

    def _write(self, ref: Ref, values: np.ndarray) -> None:
        self._memory.write(storage_name(ref), values)

    def _read(self, ref: Ref) -> np.ndarray:
        return self._memory.read(storage_name(ref))

    def _read_scalars(self, *refs: Ref) -> list[float]:
        return self._memory.read_scalars([storage_name(ref) for ref in refs])

    def _fill(self, ref: Ref, value: float) -> None:
        self._memory.fill(storage_name(ref), value)

    def _fill_constants(self) -> None:
        spec, cells = self.plan.spec, self._cells
        self._write(cells.rope, rope_table(spec.config.rope, spec.config.head_dim, spec.seq_len, np.float64))
        for inputs in (cells.batch, cells.prompt):
            self._write(inputs.positions, np.broadcast_to(np.arange(spec.seq_len), inputs.positions.shape))
        for ref in self.plan.persistent.values():
            if ref.space == "scale":
                self._fill(ref, 1 if ref.shape == (1,) or ref.name == "scales" else 0)
        if self.plan.scales:
            self._write(cells.limits, np.array(self.plan.limits))
            self._fill(cells.always, 1)


def _entries(ref: Ref, values: np.ndarray) -> np.ndarray:
    """The values of a stack's entries, or of one tensor."""
    return values if ref.is_stack else values[None]
