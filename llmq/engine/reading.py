"""A plan of reading on memory: rows of tokens in, and logits, log p of targets, or hidden states out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from llmq.backends import Backend
from llmq.engine.stored import StoredPlan
from llmq.plan.names import storage_name
from llmq.plan.plan import Plan
from llmq.plan.reading import plan_reading
from llmq.row import Row
from llmq.tensor import IGNORED, Ref


class ModelReader(StoredPlan):
    """Runs the programs of `plan_reading`. Results are arrays of the device."""

    def __init__(self, plan: Plan, backend: Backend, num_virtual: int) -> None:
        """Without weights; rows begin with `num_virtual` virtual tokens."""
        super().__init__(plan, backend)
        spec, self._num_virtual = plan.spec, num_virtual
        self._write_tables(self._cells.read_ropes)
        for name in plan.programs:
            positions = self._cells[name].positions
            if self._has(positions):
                self.write(positions, np.broadcast_to(np.arange(spec.seq_len), positions.shape))

    def load(self, parameters: Iterable[tuple[Row, np.ndarray]]) -> None:
        """Sets the weights from whole parameters (padded, any float dtype)."""
        self._set(parameters, self.plan.rows)

    def shorter(self, seq_len: int, check: Callable[[Plan], None]) -> ModelReader:
        """One with these weights that reads rows of fewer tokens; `check` gets its plan without them."""
        spec = replace(self.plan.spec, seq_len=seq_len + self._num_virtual)

        def opened(plan: Plan) -> ModelReader:
            check(plan)
            return ModelReader(plan, self._backend, self._num_virtual)

        return self.lend(plan_reading(spec, self._backend.scratch_bytes), opened)

    def read_rows(self, name: str, tokens: Any, targets: Any = None) -> Any:
        """A copy of what a program leaves of rows of tokens (n,T), a batch of them at a time: logits (n,T,V), score
        (n,T), which is log p of `targets` (n,T), or None for the token after each, or hidden (n,T,C).

        Tokens are whole numbers of any type, on the host or the device.
        """
        found = self._result(name)
        whole = type(found)((*tokens.shape, *found.shape[2:]), found.dtype)
        with self._memory.in_turn():
            for start in range(0, len(tokens), self.batch_size(name)):
                rows = slice(start, start + self.batch_size(name))
                whole[rows] = self._run(name, tokens[rows], targets if targets is None else targets[rows])
        return whole

    def view_rows(self, name: str, tokens: Any, targets: Any = None) -> Any:
        """The same of at most a batch, where the program leaves it: valid until the next call."""
        with self._memory.in_turn():
            return self._run(name, tokens, targets)

    def scored_rows(self, tokens: Any, targets: Any) -> tuple[Any, Any]:
        """Copies of the score of at most a batch of rows (n,T), and of whether a target is the most likely token
        (n,T) int32."""
        with self._memory.in_turn():
            score = self._run("score", tokens, targets).copy()
            hits = self._memory.array(storage_name(self._cells["score"].hits))
            return score, hits[self._places(tokens)].copy()

    def batch_size(self, name: str) -> int:
        """Rows that a program reads at a time."""
        return int(self._cells[name].tokens.shape[0])

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor of the model by its name in files (a copy, on the host)."""
        for row in self.plan.rows:
            values = self.parameter(row.name).reshape(row.part_axes)
            yield from ((part.name, part.take(values)) for part in row.parts)

    def _run(self, name: str, tokens: Any, targets: Any) -> Any:
        batch = self._cells[name]
        self._feed(batch.tokens, tokens, 0)
        if name == "score":
            self._feed(batch.targets, tokens[:, 1:] if targets is None else targets, IGNORED)
        self.run(name)
        found = self._result(name)[self._places(tokens)]
        return np.subtract(0, found, out=found) if name == "score" else found  # of the loss, which is -log p

    def _result(self, name: str) -> Any:
        """What a program leaves of all its rows, without the padding of the vocabulary."""
        whole = self._memory.array(storage_name(self._cells[name][name]))
        return whole[..., : self.plan.spec.config.vocab_size] if name == "logits" else whole

    def _places(self, ids: Any) -> tuple[slice, slice]:
        """Where rows of ids (n,T) are in a batch: after the virtual tokens."""
        return slice(len(ids)), slice(self._num_virtual, self._num_virtual + ids.shape[1])

    def _feed(self, ref: Ref, ids: Any, rest: int) -> None:
        """Ids (n,T) in the rows that a program reads, and `rest` beside them."""
        slot = self._memory.array(storage_name(ref))
        there = isinstance(ids, type(slot))  # else on the host, for a GPU
        rows = slot if there else np.empty(ref.shape, np.int32)
        rows.fill(rest)
        rows[self._places(ids)] = ids
        if not there:
            self.write(ref, rows)
