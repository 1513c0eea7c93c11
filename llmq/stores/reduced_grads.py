"""Gradients of many ranks: each rank makes its own of the whole model, and they are summed over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmq.row import Row
from llmq.stores.bundles import Bundle
from llmq.stores.grads import ReplicatedGrads, gradient_slots
from llmq.stores.sharding import Sharding, Shards, part_of
from llmq.tensor import NORM_ROWS, Ref

SENT_WIDTHS = 16  # a gradient is compressed if its width is a multiple of this; others, and vectors, are small
# Errors of what this rank sends in a step, as the op `quantization_error` gives them; the first micro-step clears it.
SENT_ERROR = Ref("sent_error", "cell", (6,), "fp32")


class ReducedGrads(ReplicatedGrads):
    """Gradients that are whole on every rank while it adds to them, and are summed over ranks after their last write in
    a step: a rank's share of them where optimizer states are shared out, else all."""

    def __init__(self, rows: Sequence[Row], dtype: str, *, sharding: Sharding, **about: Any) -> None:
        super().__init__(rows, dtype, **about)
        self._sharding, self._shards = sharding, Shards(rows, sharding.size, sharding.rank)

    def reduce(self, ops: Any, part: str | int, here: dict[str, Ref]) -> dict[str, Ref]:
        """The last micro-step's are reduced as soon as the part has written them: this rank's pieces <- their sums over
        ranks; then all pieces, if all are kept."""
        # Sums over ranks are linear, so one reduction a step is enough where whole gradients have room.
        if not self.last:
            return here
        # A tied head is reduced with the embedding, which writes last: twice would count it twice.
        whole = self._of(here, part)
        shares = {name: self._sum_in(ref, name) for name, ref in whole.items()}
        self._sum(ops, whole, shares)
        if self._sharding.states:
            return {**here, **shares}
        for name, ref in whole.items():
            ops.all_gather(_in_place(ref), shares[name], bounds=self._shards.bounds[name])
        return here

    def sums(self, ops: Any) -> Iterator[Ref]:
        """Yields the gradient of each row, or this rank's share of it."""
        for ref in self.refs.values():
            yield self._shards.piece(ref) if self._sharding.states else ref

    def shares(self, ops: Any) -> Iterator[Ref]:
        """Yields this rank's share of every row."""
        return (self._shards.piece(ref) for ref in self.refs.values())

    def _of(self, refs: Mapping[str, Ref], part: str | int) -> dict[str, Ref]:
        """Those of a part's own rows: a tied head only adds to the embedding's."""
        return {row.name: refs[row.name] for row in self._shards.rows if part_of(row) == part}

    def _sum(self, ops: Any, whole: Mapping[str, Ref], shares: Mapping[str, Ref]) -> None:
        """Shares <- the sums over ranks of whole gradients, by row name. Collectives follow each other: a backend may
        make them as one."""
        bounds = self._shards.bounds
        # All casts come first: a launch between two collectives would keep a backend from making them as one.
        sent = {name: self._sent(ops, ref) for name, ref in whole.items()}
        if not self._sharding.all_to_all:
            sums = {name: self._sum_in(ref, name) for name, ref in sent.items()}
            for name, total in sums.items():
                ops.reduce_scatter(total, sent[name], bounds=bounds[name])
            # Sums in another dtype, or of slots, are not yet where the optimizer reads them.
            for name, total in sums.items():
                if total != shares[name]:
                    ops.sum_pieces(shares[name], total, None, rank=0)
            return
        # Each rank sends its pieces unchanged, and the owner adds them in the order of ranks, in f32: the same bits in
        # every world, where a ring rounds at each hop, in an order of its own.
        others = {}
        for name, ref in sent.items():
            count = self._shards.count(name)
            if ref.form is not None:
                count = -(-count // NORM_ROWS) * NORM_ROWS  # so that no tile has rows of two ranks
            shape = (self._sharding.size - 1, count, ref.shape[-1])
            others[name] = Ref(f"pieces/{name}", "activation", shape, ref.dtype, ref.layer, form=ref.form)
            ops.all_to_all(others[name].in_form(None), ref.in_form(None), bounds=bounds[name])
        for name, pieces in others.items():
            ops.sum_pieces(shares[name], self._piece(whole[name], name), pieces, rank=self._sharding.rank)

    def _piece(self, ref: Ref, name: str) -> Ref:
        """This rank's piece of a tensor that is like the row `name`."""
        return replace(self._shards.piece(replace(ref, name=name)), name=ref.name)

    def _sum_in(self, ref: Ref, name: str) -> Ref:
        """That piece as what takes its place: the sum over ranks, to which nothing is added."""
        return _in_place(self._piece(ref, name))

    def _sent(self, ops: Any, ref: Ref) -> Ref:
        """A gradient in the dtype in which it is reduced, or in the form in which it is sent."""
        dtype, form = self._sharding.reduce_dtype or ref.dtype, self._sharding.compressed
        is_small = len(ref.shape) == 1 or ref.shape[-1] % SENT_WIDTHS
        if dtype == ref.dtype and (form is None or is_small):
            return ref
        # A copy, as the gradient itself is still added to in its own dtype at levels that keep it.
        slot = Ref(f"sent/{ref.name}", "activation", ref.shape, dtype, ref.layer)
        ops.cast(slot, ref)
        if form is None or is_small:
            return slot
        ops.quantization_error(SENT_ERROR, SENT_ERROR, ref, slot.in_form(form))
        return slot.in_form(form)


class ShardedGrads(ReducedGrads):
    """Gradients of which each rank holds its share alone: those of a micro-step are slots, which are summed over ranks
    and added to the shares as soon as a part has written them."""

    def __init__(self, rows: Sequence[Row], dtype: str, *, sharding: Sharding, **about: Any) -> None:
        super().__init__(rows, dtype, sharding=sharding, **about)
        self._slots = gradient_slots(self.refs)
        self.refs = {name: self._shards.share(ref) for name, ref in self.refs.items()}

    def added_to(self, part: str | int) -> dict[str, Ref]:
        """By row name, the shares that a part adds to."""
        return self._of(self.refs, part)

    def bundle(self, part: str | int, here: Mapping[str, Ref]) -> Bundle:
        """Slots for a part's gradients."""
        return super().bundle(part, self._slots)

    def reduce(self, ops: Any, part: str | int, here: dict[str, Ref]) -> dict[str, Ref]:
        """Adds sums over ranks to the shares."""
        self._sum(ops, self._of(self._slots, part), here)
        return here

    def sums(self, ops: Any) -> Iterator[Ref]:
        """Yields this rank's share of each row."""
        return iter(self.refs.values())


def _in_place(ref: Ref) -> Ref:
    """A gradient as the sum over ranks that takes its place, to which nothing is added."""
    # `again` makes it another value to the planner, which else would take the sum for one more addend.
    return replace(ref, again=ref.space == "grad", is_sum=False)
