"""What a plan on memory keeps of rows, by name: parameters, gradients and the state of a run, set and read whole.

Of many ranks each sets and reads its share.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from llmq.backends import Backend
from llmq.engine.bound_plan import BoundPlan
from llmq.model.held import Values, held_value, hold, single_scale
from llmq.model.rope import table_of
from llmq.operands import Tensor
from llmq.plan.names import scale_ref, storage_name
from llmq.plan.plan import Plan
from llmq.row import Row
from llmq.tensor import Ref

Lent = TypeVar("Lent", bound=BoundPlan)


class StoredPlan(BoundPlan):
    """A plan on memory, with the values of its rows. All arrays passed in and out are on the host."""

    def parameter(self, name: str) -> np.ndarray:
        """Master of a parameter, or a frozen one itself, padded, in its own dtype (a copy).

        One that is held in a form is given as the value of that. Where states are shared out, all ranks ask for the
        same parameters in the same order.
        """
        ref = self.plan.held(name)
        if ref.form is None:
            return self._whole(name, self.read(ref)) if self._is_shared(name) else self.read(ref)
        return held_value(Tensor(ref.name, self.read(ref), ref.shape, ref.form, self.read(scale_ref(ref))), ref.dtype)

    def gradient(self, name: str) -> np.ndarray:
        """Gradient of a parameter as accumulated since the step began: a sum over trained tokens (a copy).

        Of many ranks' it is the sum after the last micro-step; they all ask for it.
        """
        gradient, sharding = self.read(self.plan.grads[name]), self.plan.spec.sharding
        if not sharding.states:
            return gradient
        return self._whole(name, gradient if sharding.gradients else self._share(name, gradient))

    def state(self, into: Callable[[str], np.ndarray] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Name and host copy of everything that a bit-exact resume needs, one at a time; `into(name)` holds a copy.

        Of many ranks each gives its slices (`Plan.saved`), which are all of it together.
        """
        for name, slice_ in self.plan.saved().items():
            if self.plan.persistent[name].shape == slice_.shape:
                yield name, self._memory.read(name, into and into(name))
                continue
            # What is kept whole is cut here: every rank has it, and each writes its rows of it.
            mine = self._memory.read(name)[slice_.start[0] :][: slice_.shape[0]]
            if into is not None:
                copy = into(name)
                copy[...] = mine
                mine = copy
            yield name, mine

    def lend(self, whole: Plan, opened: Callable[[Plan], Lent]) -> Lent:
        """Another plan on memory, with the weights that this one holds, frozen: `opened` gets its plan without them."""
        assert whole.weights == self.plan.weights, "another model, adapter or dtype"
        lent = {storage_name(ref) for ref in whole.weights.values()}
        own = {name: ref for name, ref in whole.persistent.items() if name not in lent}
        made = opened(replace(whole, persistent=own))
        made._memory.borrow(lent, self._memory)
        return made

    def _set(self, parameters: Iterable[tuple[Row, Values]], expected: Iterable[Row]) -> None:
        """Sets masters, or what is held of frozen rows, from the values of all `expected` rows."""
        missing = {row.name for row in expected}
        with self._explained():
            for row, values in parameters:
                missing.discard(row.name)
                ref = self.plan.held(row.name)
                if ref.form is None:
                    shared = self._is_shared(row.name)
                    values = self._share(row.name, np.asarray(values)) if shared else values
                    self._memory.write(storage_name(ref), values)
                    continue
                # Each tensor of a file is quantized alone, so that what is held is what others make of the same file.
                self._hold(ref, values, tuple(part.stop for part in row.parts))
        assert not missing, f"parameters not given: {sorted(missing)}"

    def _write_tables(self, refs: Mapping[str, Ref]) -> None:
        """Sets the constants of the rotary embedding, by their names."""
        for name, ref in refs.items():
            self.write(ref, table_of(self.plan.spec.config, name, ref.shape[0]))

    def _hold(self, ref: Ref, values: Values, borders: Sequence[int]) -> None:
        """Makes what is held of a row, with the scales of what programs make of that, where it lies."""
        array, scale = (self._memory.array(storage_name(one)) for one in (ref, scale_ref(ref)))
        copy = Tensor(ref.name, array, ref.shape, ref.form, scale)
        with self._memory.room(ref.home) as room:
            hold(room, copy, ref.dtype, values, borders)
            for cell in self.plan.known_scales(ref):
                fp8 = cell.name.rpartition("@")[2]
                single_scale(room, self._memory.array(storage_name(cell)), copy, ref.dtype, fp8)

    def _is_shared(self, name: str) -> bool:
        """Whether this rank has no more of a parameter's state than its share, which may be nothing."""
        return self.plan.spec.sharding.states and name in self.plan.shards.bounds

    def _share(self, name: str, values: np.ndarray) -> np.ndarray:
        """This rank's rows of a whole parameter."""
        shards = self.plan.shards
        first = shards.bounds[name][shards.rank]
        found = values.reshape(-1, values.shape[-1])[first : first + shards.count(name)]
        return found.reshape(shards.share_shape(name, values.shape))

    def _whole(self, name: str, share: np.ndarray) -> np.ndarray:
        """A parameter of the shares of all ranks."""
        shards, shape = self.plan.shards, self.plan.shape(name)
        whole = np.empty(shape, share.dtype)
        pieces = [whole.reshape(-1, shape[-1])[start:stop] for start, stop in pairwise(shards.bounds[name])]
        self._backend.world.exchange([share.reshape(-1, shape[-1])] * shards.size, pieces)
        return whole


class TrainedPlan(StoredPlan):
    """A plan of training on memory: where its weights come from, and whether they are whole."""

    def __init__(self, plan: Plan, backend: Backend, **about: Any) -> None:
        super().__init__(plan, backend, **about)
        self._is_gathered = False  # whether all weights are whole; of one rank they are
        self._is_cold = True  # whether delayed scales have seen no batch yet
        spec, cells = self.plan.spec, self._cells
        self._write_tables(cells.ropes)
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

    def load(self, parameters: Iterable[tuple[Row, Values]]) -> None:
        """Sets masters from whole parameters (padded, any float dtype) and makes all copies; moments become zero."""
        self._set(parameters, self.plan.rows)
        for name in self.plan.moment_names:
            self._memory.fill(name, 0)
        self._publish(is_cold=True)

    def restore(self, read: Callable[..., np.ndarray], frozen: Iterable[tuple[Row, np.ndarray]] = ()) -> None:
        """Sets the state from `read(name)`, and the `frozen` rows, which it lacks; makes all copies of the weights.

        Of what this rank has a share of it reads that: `read(name, start, shape)`.
        """
        self._set(frozen, self.plan.loaded_anew)
        shares = self.plan.saved() if self.plan.spec.sharding.states else {}
        for name, ref in self.plan.state().items():
            mine = shares.get(name)
            if mine is not None and mine.shape != mine.whole:
                self._memory.write(name, read(name, mine.start, mine.shape))
            elif math.prod(ref.shape):
                self._memory.write(name, read(name))
        self._publish(is_cold=False)

    def gather(self) -> None:
        """Makes the weights whole, if they were updated since a step made them so. All ranks ask for it."""
        # One rank has no such program: its update writes whole weights.
        if not self._is_gathered and "gather" in self.plan.programs:
            self.run("gather")
        self._is_gathered = True

    def _publish(self, *, is_cold: bool) -> None:
        self.run("publish")
        self._is_gathered, self._is_cold = False, is_cold
