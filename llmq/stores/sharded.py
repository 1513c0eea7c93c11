"""The stores of many ranks: gradients that are summed over them, and states and weights of which each has a share.

Each rank makes gradients of the whole model, and updates its share of every row. Weights are gathered once in a step,
or for each use.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from llmq.optimizers.rule import StateKind
from llmq.row import Row
from llmq.stores.fetched_weights import ALL_HERE, FetchedWeights, Homes, fetched, weight_slot, written_here
from llmq.stores.fused_grads import gradient_slots
from llmq.stores.replicated import Bundle, ReplicatedGrads, ReplicatedMoments, StatePiece, Update, each_of
from llmq.stores.sharding import Bounds, Sharding, Shards, part_of
from llmq.tensor import IN_MASTER, NORM_ROWS, OWN, Origin, Ref, changed

SUMMED, LARGEST = ("loss", "tokens", "hits"), ("amax", "request")  # over all ranks
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
            ops.all_to_all(changed(others[name], form=None), changed(ref, form=None), bounds=bounds[name])
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
        ops.quantization_error(SENT_ERROR, SENT_ERROR, ref, sent := changed(slot, form=form))
        return sent


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


class ShardedMoments(ReplicatedMoments):
    """The state of this rank's share of every row."""

    def __init__(
        self, rows: Sequence[Row], master_dtype: str, kinds: Mapping[StateKind, str], *, sharding: Sharding
    ) -> None:
        super().__init__(rows, master_dtype, kinds)
        self._shards = Shards(rows, sharding.size, sharding.rank)
        self.refs = {name: each_of(state, self._shards.share) for name, state in self.refs.items()}

    def walk(self, ops: Any, *, masters_only: bool = False, only: Container[str] | None = None) -> Iterator[Update]:
        """Yields each row with this rank's share of its state."""
        for row in self._of(only):
            # The place in the whole row addresses the bits of stochastic rounding, so shards round as one rank does.
            yield Update(row, (StatePiece(self.refs[row.name], self._shards.first(row)),))


class GatheredWeights(FetchedWeights):
    """Weights that every rank holds whole. The update writes this rank's share of each, in the forms in which shares
    are those of the whole; all are gathered in the next forward pass, each part while the one before it computes.

    Rows that live on the host have their shares there: what is gathered is a slot, which is used and sent there, and
    later walks fetch it.
    """

    def __init__(
        self, rows: Sequence[Row], dtype: str, master_dtype: str | None, homes: Homes = ALL_HERE, *, sharding: Sharding
    ) -> None:
        # No weight is its own master here: the master is a share, and the weight is whole.
        super().__init__(rows, dtype, None, homes._replace(host_master=None))
        self._shards, self._gathers = Shards(rows, sharding.size, sharding.rank), False
        masters = {"device": master_dtype, "host": homes.host_master}
        self._own = {
            row.name: self._shards.share(
                replace(whole, space="shard", origin=IN_MASTER if whole.dtype == masters[whole.home] else OWN)
            )
            for row in self._shards.rows
            for whole in [self.refs[row.name]]
        }

    @property
    def first(self) -> GatheredWeights:
        """The weights as the first micro-step of a step walks them, whose forward pass gathers them."""
        # A view of the same Refs: only the first micro-step of a step finds weights that the update has changed.
        found = copy(self)
        found._gathers = True
        return found

    def gather(self, ops: Any) -> None:
        """Makes all weights whole for what reads them before the next step does."""
        for part in dict.fromkeys(map(part_of, self._shards.rows)):
            self._make_whole(ops, part, "gather")

    def written(self, ops: Any, only: Container[str] | None = None) -> Iterator[Ref | None]:
        """Yields this rank's share of each trained row."""
        return written_here(ops, (ref for name, ref in self._own.items() if only is None or name in only))

    def _needed(self, parts: tuple[str | int, ...]) -> tuple[str | int, ...]:
        # Training's forward walk ends before the head, which backward uses first; only forward gathers.
        return parts if "head" in parts else (*parts, "head")  # which is used first on the way back

    def _fetch(self, ops: Any, part: str | int, phase: str) -> dict[str, Ref]:
        """Makes the rows of a part whole where they are; returns what is to be read in their place."""
        if self._gathers and phase == "forward":
            return self._make_whole(ops, part, phase)
        return super()._fetch(ops, part, phase)

    def _make_whole(self, ops: Any, part: str | int, phase: str) -> dict[str, Ref]:
        """Gathers the rows of a part; returns the slots of those that live on the host, and sends these there."""
        # Collectives need device memory: what lives on the host is gathered into a slot, used there and sent back.
        slots = {name: weight_slot(ref, phase) for name, ref in self._on_host(part).items()}
        rows = [row for row in self._shards.rows if part_of(row) == part]
        self._gather(ops, {row.name: slots.get(row.name, self.refs[row.name]) for row in rows}, phase)
        for name, slot in slots.items():
            ops.copy_to_host(self.refs[name], slot)
        return slots

    def _gather(self, ops: Any, whole: Mapping[str, Ref], phase: str) -> None:
        """Whole rows, by name, <- all ranks' shares. Collectives follow each other, after what comes from the host."""
        # All shares come before the first collective, as a backend may make collectives as one that follow each other.
        shares = {name: fetched(ops, self._own[name], f"{phase}/share") for name in whole}
        for name, ref in whole.items():
            ops.all_gather(ref, shares[name], bounds=self._shards.bounds[name])


class ShardedWeights(GatheredWeights):
    """Weights of which each rank holds its share alone: a part's are gathered into slots for each use, of shares that
    come from the host where they live there.

    Frozen rows are whole on every rank.
    """

    def __init__(self, *about: Any, sharding: Sharding) -> None:
        super().__init__(*about, sharding=sharding)
        self._whole = {row.name: replace(self.refs[row.name], home="device") for row in self._shards.rows}
        self.refs = {**self.refs, **self._own}

    @property
    def first(self) -> ShardedWeights:
        """The same: every walk gathers them."""
        return self

    def gather(self, ops: Any) -> None:
        """Nothing is held whole."""

    def _fetch(self, ops: Any, part: str | int, phase: str) -> dict[str, Ref]:
        """Slots by row name with the whole of each row of a part."""
        rows = [row for row in self._shards.rows if row.name in self._names[part]]
        slots = {}
        for row in rows:
            # A tied head reads the embedding in another part of the same phase: two slots, each with a short life.
            name = f"{phase}/{'' if part_of(row) == part else f'{part}/'}{row.name}"
            slots[row.name] = replace(
                self._whole[row.name], name=name, space="activation", origin=Origin(cell=row.name)
            )
        self._gather(ops, slots, phase)
        return slots


class ManyRanks:
    """A run of many ranks. `tiles` are the bounds of their shares of all partial sums of squares."""

    def __init__(self, tiles: Bounds) -> None:
        self._tiles = tiles

    def cells(self, cells: Mapping[str, Ref]) -> dict[str, Ref]:
        """Cells for what is agreed, beside those of this rank."""
        names = [name for name in (*SUMMED, *LARGEST) if name in cells]
        agreed = {name: replace(cells[name], name=f"agreed.{cells[name].name}", space="cell") for name in names}
        if (own := cells.get("partials")) is not None:
            agreed["partials"] = replace(own, name=f"agreed.{own.name}", shape=(self._tiles[-1], 1))
        return {**cells, **agreed}

    def agree(self, ops: Any, cells: Mapping[str, Ref], *names: str) -> Mapping[str, Ref]:
        """The cells with what all ranks have found in place of what each has: sums, or the largest; of `names` those
        that there are are agreed on."""
        agreed = self.cells(cells)
        for name in (name for name in names if name in cells):
            # Gathered, not summed: the norm adds all partial sums in one order, so it has the bits of any number of
            # ranks. The largest request wins: exit codes are above 1, which asks for a checkpoint, so an end outranks
            # a save.
            if name == "partials":
                ops.all_gather(agreed[name], cells[name], bounds=self._tiles)
            else:
                ops.all_reduce(agreed[name], cells[name], largest=name in LARGEST)
        return agreed
