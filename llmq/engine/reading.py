"""A plan of reading on memory: rows of tokens in, and logits, log p of targets, or hidden states out."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from llmq.backends import Backend
from llmq.engine.stored import StoredPlan
from llmq.model.rope import rope_table
from llmq.plan.names import storage_name
from llmq.plan.plan import Plan
from llmq.row import Row


class ModelReader(StoredPlan):
    """Runs the programs of `plan_reading`, whose results are arrays of the device, valid until the next call."""

    def __init__(self, plan: Plan, backend: Backend, parameters: Iterable[tuple[Row, np.ndarray]]) -> None:
        """With the weights in `parameters`, whole and padded, of any float dtype."""
        super().__init__(plan, backend)
        spec = plan.spec
        self._set(parameters, plan.rows)
        self.write(self._cells.read_rope, rope_table(spec.config.rope, spec.config.head_dim, spec.seq_len, np.float64))
        for name in plan.programs:
            positions = self._cells[name].positions
            if self._has(positions):
                self.write(positions, np.broadcast_to(np.arange(spec.seq_len), positions.shape))

    def score(self, tokens: np.ndarray, targets: np.ndarray) -> Any:
        """-log p (B,T) of targets (B,T) after tokens (B,T) int; 0 where a target is -100."""
        return self._run("score", "loss", tokens, targets)

    def logits(self, tokens: np.ndarray) -> Any:
        """Logits (T,Vp) of one row of tokens (1,T)."""
        return self._run("logits", "logits", tokens)

    def hidden(self, tokens: np.ndarray) -> Any:
        """The residual stream after the last norm (B,T,C) of tokens (B,T)."""
        return self._run("hidden", "hidden", tokens)

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor of the model by its name in files (a copy, on the host)."""
        for row in self.plan.rows:
            values = self.parameter(row.name).reshape(row.part_axes)
            yield from ((part.name, values[part.start : part.stop]) for part in row.parts)

    def _run(self, name: str, output: str, tokens: np.ndarray, targets: np.ndarray | None = None) -> Any:
        batch = self._cells[name]
        self._memory.settle()  # what still reads the results of the call before
        self.write(batch.tokens, tokens)
        if targets is not None:
            self.write(batch.targets, targets)
        self.run(name)
        self._memory.settle()
        return self._memory.array(storage_name(getattr(batch, output)))
