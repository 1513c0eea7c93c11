"""Gradients of many ranks: each rank makes its own of the whole model, and they are summed over ranks."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from llmq.row import Row
from llmq.stores.bundles import Bundle, part_bundle, part_tree
from llmq.stores.grads import ReplicatedGrads, gradient_slots
from llmq.stores.sharding import Sharding, Shards, part_of
from llmq.tensor import NORM_ROWS, Ref

SENT_WIDTHS = 16  # a gradient is compressed if its width is a multiple of this; others, and vectors, are small
# Errors of what this rank sends in a step, as the op `quantization_error` gives them; whoever begins a step clears it.
SENT_ERROR = Ref("sent_error", "cell", (6,), "fp32")


class ReducedGrads(ReplicatedGrads):
    """Gradients that are whole on every rank while it adds to them, and are summed over ranks after their last write in
    a step: a rank's share of them where optimizer states are shared out, else all."""

    def __init__(self, rows: Sequence[Row], dtype: str, *, last: bool = False, sharding: Sharding) -> None:
        super().__init__(rows, dtype, last=last)
        self._sharding, self._shards = sharding, Shards(rows, sharding.size, sharding.rank)

    def walk(self, ops: Any, parts: Iterable[str | int]) -> Iterator[Bundle]:
        """Yields each part's gradients; the last micro-step's are reduced as soon as the part has written them."""
        for part in parts:
            yield part_bundle(self._tree, part)
            if self.last:
                self._reduce(ops, self._of(self.refs, part))

    def sums(self, ops: Any, only: Container[str] | None = None) -> Iterator[Ref]:
        """Yields the gradient of each row, or of those named in `only`, or this rank's share of it."""
        for ref in self._of_rows(only):
            yield self._shards.piece(ref) if self._sharding.states else ref

    def shares(self, ops: Any, only: Container[str] | None = None) -> Iterator[Ref]:
        """Yields this rank's share of every row, or of those named in `only`."""
        for ref in self._of_rows(only):
            yield self._shards.piece(ref)

    def _of(self, refs: dict[str, Ref], part: str | int) -> list[Ref]:
        return [refs[row.name] for row in self._shards.rows if part_of(row) == part]

    def _reduce(self, ops: Any, refs: Sequence[Ref]) -> None:
        """This rank's pieces of gradients <- their sums over ranks; then all pieces, if all are kept."""
        shares = [replace(self._shards.piece(ref), again=True) for ref in refs]
        self._sum(ops, refs, shares)
        if not self._sharding.states:
            for ref, share in zip(refs, shares, strict=True):
                ops.all_gather(replace(ref, again=True), share, bounds=self._shards.bounds[ref.name])

    def _sum(self, ops: Any, refs: Sequence[Ref], shares: Sequence[Ref]) -> None:
        """Shares <- the sums over ranks of gradients. Collectives stand together: a backend may make them as one."""
        bounds = [self._shards.bounds[share.name] for share in shares]
        sent = [self._sent(ops, ref) for ref in refs]
        if not self._sharding.all_to_all:
            sums = [self._sum_in(whole, share.name) for whole, share in zip(sent, shares, strict=True)]
            for total, whole, cut in zip(sums, sent, bounds, strict=True):
                ops.reduce_scatter(total, whole, bounds=cut)
            for share, total in zip(shares, sums, strict=True):
                if total != share:
                    ops.sum_pieces(share, total, None, rank=0)
            return
        others = []
        for share, whole, cut in zip(shares, sent, bounds, strict=True):
            count = self._shards.count(share.name)
            if whole.form is not None:
                count = -(-count // NORM_ROWS) * NORM_ROWS  # so that no tile has rows of two ranks
            shape = (self._sharding.size - 1, count, whole.shape[-1])
            others.append(Ref(f"pieces/{share.name}", "activation", shape, whole.dtype, whole.layer, form=whole.form))
            ops.all_to_all(others[-1].in_form(None), whole.in_form(None), bounds=cut)
        for share, ref, pieces in zip(shares, refs, others, strict=True):
            ops.sum_pieces(share, self._piece(ref, share.name), pieces, rank=self._sharding.rank)

    def _piece(self, ref: Ref, name: str) -> Ref:
        """This rank's piece of a tensor that is like the row `name`."""
        return replace(self._shards.piece(replace(ref, name=name)), name=ref.name)

    def _sum_in(self, ref: Ref, name: str) -> Ref:
        """That piece as what takes its place: the sum over ranks, to which nothing is added."""
        return replace(self._piece(ref, name), again=ref.space == "grad", is_sum=False)

    def _sent(self, ops: Any, ref: Ref) -> Ref:
        """A gradient in the dtype in which it is reduced, or in the form in which it is sent."""
        dtype, form = self._sharding.reduce_dtype or ref.dtype, self._sharding.compressed
        is_small = len(ref.shape) == 1 or ref.shape[-1] % SENT_WIDTHS
        if dtype == ref.dtype and (form is None or is_small):
            return ref
        slot = Ref(f"sent/{ref.name}", "activation", ref.shape, dtype, ref.layer)
        ops.cast(slot, ref)
        if form is None or is_small:
            return slot
        ops.quantization_error(SENT_ERROR, SENT_ERROR, ref, slot.in_form(form))
        return slot.in_form(form)


class ShardedGrads(ReducedGrads):
    """Gradients of which each rank holds its share alone: those of a micro-step are slots, which are summed over ranks
    and added to the shares as soon as a part has written them."""

    def __init__(self, rows: Sequence[Row], dtype: str, *, last: bool = False, sharding: Sharding) -> None:
        super().__init__(rows, dtype, last=last, sharding=sharding)
        self._slots = gradient_slots(self.refs)
        self.refs = {name: self._shards.share(ref) for name, ref in self.refs.items()}
        self._tree = part_tree({row.name: self._slots.get(row.name) for row in rows})

    def walk(self, ops: Any, parts: Iterable[str | int]) -> Iterator[Bundle]:
        """Yields slots for each part's gradients, whose sums over ranks it adds to the shares."""
        for part in parts:
            yield part_bundle(self._tree, part)
            self._sum(ops, self._of(self._slots, part), self._of(self.refs, part))

    def sums(self, ops: Any, only: Container[str] | None = None) -> Iterator[Ref]:
        """Yields this rank's share of each row, or of those named in `only`."""
        return self._of_rows(only)
