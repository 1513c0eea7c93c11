"""A plan made flesh: memory allocated, programs bound to a backend, and the few things a training loop asks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from llmq.backends import Backend, Call, Op
from llmq.bind import bind
from llmq.plan.observe import FIELDS, STRIDE
from llmq.plan.plan import SCALE_STRIDE, Plan
from llmq.rope import document_positions, rope_table
from llmq.rows import Row

WARM_UP_PASSES = 8  # fp8 scales settle in about as many passes as a layer has matmuls in a chain
SAMPLES = "batch:batch.samples"
SETTLED = 0.05  # relative change of every scale between two passes


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
        self._backend, self._poison = backend, poison
        backend.prepare(step for program in plan.programs.values() for step in program.steps)
        self._memory = backend.memory(plan.persistent, plan.activation_bytes)
        self._ops = {name: wrap(name, op) for name, op in backend.ops.items()} if wrap else backend.ops
        self._programs: dict[str, Call] = {}
        self._fill_constants()

    # parameters

    def load(self, parameters: Iterable[tuple[Row, np.ndarray]]) -> None:
        """Sets masters from whole parameters (padded, any float dtype) and makes all copies; moments become zero."""
        missing = {row.name for row in self.plan.rows}
        for row, values in parameters:
            self._memory.write(self._state(row.name, "master"), values)
            missing.discard(row.name)
        assert not missing, f"parameters not given: {sorted(missing)}"
        for row in self.plan.rows:
            for space in ("m", "v"):
                self._memory.fill(self._state(row.name, space), 0)
        self.run("publish")

    def parameter(self, name: str) -> np.ndarray:
        """Master of a parameter, padded, in its own dtype (a copy)."""
        return self._memory.read(self._state(name, "master"))

    def gradient(self, name: str) -> np.ndarray:
        """Gradient of a parameter as accumulated since the step began: a sum over trained tokens (a copy)."""
        return self._memory.read(f"grad:{name}")

    # training

    def micro_step(
        self,
        tokens: np.ndarray,
        targets: np.ndarray,
        borders: np.ndarray | None = None,
        *,
        first: bool,
        samples: np.ndarray | None = None,
    ) -> None:
        """Forward and backward of one micro-batch, (B,T) int32 each; target -100 is not trained.

        A packed plan needs `borders` (B,D+1) int32, with D at most its max_docs: the first tokens of each row's
        documents, then T repeated. The first micro-step of an optimizer step overwrites gradients and sums, the others
        add. `samples` (B,) int are the rows' places in the run's sequence, which a plan with noise needs.
        """
        assert samples is not None or SAMPLES not in self.plan.persistent, "noise is a function of a sample's place"
        self._set_batch(tokens, targets, borders, samples)
        self.run("first" if first else "next")

    def update(self, step: int, learning_rate: float) -> StepResult:
        """The optimizer step number `step`, counted from 1. Nothing changes if loss or gradient is not finite."""
        self._memory.fill("cell:step", step)
        self._memory.fill("cell:learning_rate", learning_rate)
        self.run("update")
        results = ("sum:loss", "sum:tokens", "cell:norm", "cell:apply")
        loss, tokens, norm, applied = self._memory.read_scalars(results)
        return StepResult(loss / max(tokens, 1.0), norm, int(tokens), applied != 0)

    @property
    def needs_warm_up(self) -> bool:
        """Whether delayed scales exist, which a first batch has to set."""
        return bool(self.plan.scales)

    def warm_up(
        self,
        tokens: np.ndarray,
        targets: np.ndarray,
        borders: np.ndarray | None = None,
        samples: np.ndarray | None = None,
    ) -> int:
        """Repeats a micro-batch without updating until no scale changes any more; returns the passes it took."""
        for count in range(1, WARM_UP_PASSES + 1):
            before = self._memory.read("scale:scales")
            self.run("publish_counted")
            self.micro_step(tokens, targets, borders, first=True, samples=samples)
            amax = self._memory.read("scale:amax")[::SCALE_STRIDE]
            self._memory.fill("scale:history", 0)
            self.run("calibrate")
            after = self._memory.read("scale:scales")
            self.run("publish")
            if amax.all() and np.all(np.abs(after - before) <= SETTLED * before):
                return count
        return WARM_UP_PASSES

    # reading

    def observe(
        self,
        tokens: np.ndarray,
        targets: np.ndarray,
        borders: np.ndarray | None = None,
        samples: np.ndarray | None = None,
    ) -> np.ndarray:
        """Six numbers for every copy in `plan.observed`, (copies, 6): see the op `quantization_error`.

        One forward and backward of a micro-batch at the start of an optimizer step, whose first micro-step overwrites
        what it leaves; scales and their statistics do not change.
        """
        self._memory.fill("cell:quantization_error", 0)
        self._set_batch(tokens, targets, borders, samples)
        self.run("observe")
        return self._memory.read("cell:quantization_error").reshape(-1, STRIDE)[:, :FIELDS]

    def evaluate(self, tokens: np.ndarray, targets: np.ndarray, borders: np.ndarray | None = None) -> tuple[float, int]:
        """Sum of losses and number of trained tokens of a batch, as given to `micro_step`."""
        self._set_batch(tokens, targets, borders)
        self.run("evaluate")
        loss, count = self._memory.read_scalars(["sum:evaluate.loss", "sum:evaluate.tokens"])
        return loss, int(count)

    def next_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits (V,) f32 of the token after `tokens` (n,), of which the last seq_len are read."""
        tokens = np.asarray(tokens, np.int32)[-self.plan.seq_len :]
        padded = np.zeros((1, self.plan.seq_len), np.int32)
        padded[0, : tokens.size] = tokens
        self._memory.write("batch:prompt.tokens", padded)
        self._memory.fill("batch:prompt.index", tokens.size - 1)
        self.run("generate")
        logits = self._memory.read("cell:logits").reshape(-1)[: self.plan.config.vocab_size]
        return logits if logits.dtype == np.float64 else logits.astype(np.float32)

    # state

    def state(self) -> Iterator[tuple[str, np.ndarray]]:
        """Name and host copy of everything that a bit-exact resume needs, one at a time."""
        for name in self.plan.state():
            yield name, self._memory.read(name)

    def restore(self, read: Callable[[str], np.ndarray]) -> None:
        """Sets the state from `read(name)` and makes all copies of the weights."""
        for name in self.plan.state():
            self._memory.write(name, read(name))
        self.run("publish")

    def run(self, name: str) -> None:
        """Runs a program of the plan by name; it is bound on first use."""
        if name not in self._programs:
            self._programs[name] = self._backend.program(self._bound(name, self._ops, poison=self._poison))
        self._programs[name]()

    def traced(self, name: str, wrap: Callable[[str, Op], Op]) -> Call:
        """A program of the plan, with `wrap` around every op, that runs eagerly whenever it is called; for timing."""
        ops = {op: wrap(op, function) for op, function in self._ops.items()}
        calls = self._bound(name, ops)
        return lambda: self._backend.program(calls)()

    def part(self, name: str, indices: Iterable[int]) -> Call:
        """These steps of a program of the plan, which run as a program of their own; for timing."""
        calls = self._bound(name, self._ops)
        return self._backend.program([calls[index] for index in indices])

    def _bound(self, name: str, ops: Mapping[str, Op], *, poison: bool = False) -> list[Call]:
        scratch_bytes = self._backend.scratch_bytes if self._backend.takes_scratch else None
        return bind(self.plan, name, self._memory, ops, scratch_bytes, poison=poison)

    def _state(self, name: str, space: str) -> str:
        return f"{space}:{name}"

    def _set_batch(
        self,
        tokens: np.ndarray,
        targets: np.ndarray,
        borders: np.ndarray | None = None,
        samples: np.ndarray | None = None,
    ) -> None:
        self._memory.write("batch:batch.tokens", tokens)
        self._memory.write("batch:batch.targets", targets)
        if samples is not None and SAMPLES in self.plan.persistent:
            self._memory.write(SAMPLES, samples.astype(np.int32))  # modulo 2^32
        assert (borders is None) == (self.plan.packing is None), "rows have borders where the plan has them"
        if borders is None or self.plan.packing is None:
            return
        marks = np.full((len(tokens), self.plan.packing.max_docs + 1), self.plan.seq_len, np.int32)
        marks[:, : borders.shape[1]] = borders
        self._memory.write("batch:batch.borders", marks)
        self._memory.write("batch:batch.positions", document_positions(marks, self.plan.seq_len))

    def _fill_constants(self) -> None:
        plan, memory = self.plan, self._memory
        table = rope_table(plan.config.rope, plan.config.head_dim, plan.seq_len, np.float64)
        memory.write("const:rope", table)
        for prefix in ("batch:batch", "batch:prompt"):
            positions = plan.persistent[f"{prefix}.positions"].shape
            memory.write(f"{prefix}.positions", np.broadcast_to(np.arange(plan.seq_len), positions))
        for name, ref in plan.persistent.items():
            if ref.space == "scale":
                memory.fill(name, 1 if ref.shape == (1,) or ref.name == "scales" else 0)
        if plan.scales:
            memory.write("scale:limits", np.array(plan.limits))
            memory.fill("cell:always", 1)
