"""The stores of a run whose ranks hold everything: weights, gradients, optimizer states, and what a step agrees on.

Other stores are subclasses of these, or wrap them. What they yield of a part of the model is a `Bundle`:
`w.up.weight`, with None for what a model lacks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeVar

from llmq.optimizers.rule import MASTER, State, StateKind
from llmq.row import Row
from llmq.stores.sharding import part_of
from llmq.tensor import Form, Ref

Fetched = TypeVar("Fetched")
# The form of a trained weight that has no wider master: the optimizer updates it in its place.
MASTER_FORM = Form("e4m3", "row", "powers")


class Bundle:
    """A tree of Refs by dotted name; an absent leaf (the bias of a site without one) is None."""

    def __init__(self) -> None:
        self._children: dict[str, Any] = {}

    # None, not an error: ops take None for an operand that a model lacks, and block code stays a straight line.
    def __getattr__(self, name: str) -> Any:
        return self._children.get(name)


def bundle_tree(refs: Mapping[str, Ref | None]) -> Bundle:
    """All of `refs`, by dotted name, as one tree."""
    root = Bundle()
    for path, ref in refs.items():
        *parents, leaf = path.split(".")
        node = root
        for parent in parents:
            node = node._children.setdefault(parent, Bundle())
        node._children[leaf] = ref
    return root


def part_bundle(refs: Mapping[str, Ref | None], part: str | int) -> Bundle:
    """The tensors of a part of the model, `embed`, a layer by its number, or `head`, of `refs` by row name; a tied
    head, which has no row of its own, is the embedding."""
    found = bundle_tree({"head.weight": refs["embed.weight"], **refs} if "embed.weight" in refs else refs)
    for name in ("layers", str(part)) if isinstance(part, int) else (part,):
        found = found._children.get(name) or Bundle()
    return found


def names_by_part(rows: Iterable[Row]) -> dict[str | int, list[str]]:
    """Names of the rows that each part of a model reads; a tied head reads the embedding."""
    found = defaultdict(list)
    for row in rows:
        found[part_of(row)].append(row.name)
    if "head.weight" not in found["head"]:
        found["head"].append("embed.weight")
    return found


def one_ahead(fetched: Iterable[Fetched]) -> Iterator[Fetched]:
    """Yields what is fetched, each after the next one was."""
    # pairwise asks for the next one before it gives this one: that is all that runs a copy ahead.
    for here, _ in pairwise(chain(fetched, [None])):
        assert here is not None
        yield here


class Homes(NamedTuple):
    """Which weights are `hosted` on the host, if any, and the dtype of masters there (None: they are on the device)."""

    hosted: Callable[[Row], bool] | None = None
    host_master: str | None = None


ALL_HERE = Homes()


class ReplicatedWeights:
    """Refs of all parameters in `dtype`; one whose master has the same dtype is its own master, unless masters are
    others' (None).

    Rows that live on the host by their `homes` do so in the forms that are read of them: each walk brings them into
    slots, so that those of two parts are on the device. A weight of the dtype of masters there is its own master.

    A frozen row has no master. It is held in its own dtype, if it has one, or in a form: then every other form that is
    read comes from a slot, cast a part of the model at a time. So is a trained row that has no wider master.
    """

    def __init__(self, rows: Sequence[Row], dtype: str, master_dtype: str | None, homes: Homes = ALL_HERE) -> None:
        hosted = homes.hosted
        self.rows = tuple(replace(row, home="host") if hosted and hosted(row) else row for row in rows)
        self._master_dtypes = {"device": master_dtype, "host": homes.host_master}
        self.refs = {row.name: self._ref(row, dtype) for row in self.rows}
        self._names = names_by_part(rows)
        self._held: dict[str | int, list[Ref]] = defaultdict(list)  # by part
        for row in self.rows:
            if row.stored is not None and row.layer is not None:
                self._held[row.layer].append(self.refs[row.name])

    def walk(self, ops: Any, parts: Iterable[str | int], phase: str) -> Iterator[tuple[str | int, Bundle]]:
        """Yields (part, bundle) in the order given. The next part is fetched before this one is used; what is cast are
        slots, of which the plan keeps what is read, and for as long."""
        # Generators: each fetch is recorded when the walk reaches it, so that copies lie between the calls of the part
        # before, which they overlap.
        parts = tuple(parts)
        coming = (self._fetch(ops, part, phase) for part in self._needed(parts))
        # Not strict: a store may fetch one part more than is walked, for what comes after.
        for part, here in zip(parts, one_ahead(coming), strict=False):
            refs = {name: self.refs[name] for name in self._names[part]}
            made = self._slots(ops, part, phase, here)
            yield part, part_bundle({**refs, **here, **made}, part)

    @property
    def first(self) -> ReplicatedWeights:
        """The weights as the first micro-step of a step walks them."""
        return self

    def gather(self, ops: Any) -> None:
        """Makes all weights whole outside of a step; those of one rank are."""

    def written(self, ops: Any, only: Container[str] | None = None) -> Iterator[Ref | None]:
        """Yields what the copies of each trained row, or of those named in `only`, are written to, None for a row that
        has no other copy than its value; they are where they belong when the next row's, or the next part's, is asked
        for."""
        rows = [row for row in self.rows if row.trainable and (only is None or row.name in only)]
        # A row without a wider master is updated in its own form: there is no copy to write.
        return written_here(ops, (self.refs[row.name] if row.stored is None else None for row in rows))

    def frozen(self) -> list[Ref]:
        """The rows that are not trained and whose copies are made once, of their value."""
        return [self.refs[row.name] for row in self.rows if not row.trainable and row.stored is None]

    def _ref(self, row: Row, dtype: str) -> Ref:
        is_master = row.trainable and (row.dtype or dtype) == self._master_dtypes[row.home]
        value_in = "master" if is_master else None
        about: dict[str, Any] = {"form": row.stored, "home": row.home, "value_in": value_in}
        return Ref(row.name, "weight", row.shape, row.dtype or dtype, row.layer, **about)

    def _needed(self, parts: tuple[str | int, ...]) -> tuple[str | int, ...]:
        """The parts that a walk fetches."""
        return parts

    def _fetch(self, ops: Any, part: str | int, phase: str) -> dict[str, Ref]:
        """What is read in place of a part's rows, by name, once it is where it is used: slots of those on the host."""
        return {name: fetched(ops, ref, phase) for name, ref in self._on_host(part).items()}

    def _on_host(self, part: str | int) -> dict[str, Ref]:
        """The rows of a part that live on the host."""
        return {name: ref for name in self._names[part] if (ref := self.refs[name]).home == "host"}

    def _slots(self, ops: Any, part: str | int, phase: str, fetched: dict[str, Ref]) -> dict[str, Ref]:
        """What a part's rows that are held in a form are read from, by name; what has been `fetched` is there."""
        return {ref.name: self._cast(ops, ref, phase) for ref in self._held[part]}

    def _cast(self, ops: Any, held: Ref, phase: str) -> Ref:
        """A slot with every form of a row that is held in one, which never changes: their single scale is known."""
        assert held.form is not None
        # fp8 that is stored with a scale for each tile has none for the whole.
        cell = None if held.form.dtype == "e4m3" and held.form.owns_scales else held.name
        about: dict[str, Any] = {"cell": cell, "held": held}
        slot = Ref(f"{phase}/{held.name}", "activation", held.shape, held.dtype, held.layer, **about)
        ops.cast(slot, held)
        return slot


def weight_slot(ref: Ref, phase: str) -> Ref:
    """A slot for what is read of a weight, or written, in a phase."""
    # The scale cell is the row's own: a slot lives for one use, and a delayed scale needs the history of all of them.
    return Ref(f"{phase}/{ref.name}", "activation", ref.shape, ref.dtype, ref.layer, cell=ref.name)


def fetched(ops: Any, ref: Ref, phase: str) -> Ref:
    """A weight on the device: itself, or a slot with what the host has."""
    if ref.home == "device":
        return ref
    # Named by phase: forward and backward fetch it separately, and it holds no memory between the two.
    ops.copy_to_device(slot := weight_slot(ref, phase), ref)
    return slot


def written_here(ops: Any, refs: Iterable[Ref | None]) -> Iterator[Ref | None]:
    """Each weight that is written, or a slot for one of the host, which is sent there when the next is asked for."""
    for ref in refs:
        if ref is None or ref.home == "device":
            yield ref
            continue
        # What writes the slot is recorded before the generator continues, and so before the copy back.
        yield (slot := weight_slot(ref, "update"))
        ops.copy_to_host(ref, slot)


def gradient_slots(refs: Mapping[str, Ref]) -> dict[str, Ref]:
    """By row name, slots in which the gradients of one micro-step are made."""
    return {
        name: replace(ref, name=f"gradient/{name}", space="activation", home="device", is_sum=True, cell=name)
        for name, ref in refs.items()
    }


class ReplicatedGrads:
    """Refs of the gradients of all rows that are trained; of a frozen one the bundles have None.

    The first write of a row in a step overwrites, later ones add (llmq/plan/passes/accumulate.py). `last` says whether
    the micro-step is the last one of a step, after which a row has its sum. `home` is where they live: where that is
    the host, HostedGrads walks them.
    """

    def __init__(self, rows: Sequence[Row], dtype: str, *, last: bool = False, home: str = "device") -> None:
        self.last = last
        trained = [row for row in rows if row.trainable]
        self.refs = {row.name: Ref(row.name, "grad", row.shape, dtype, row.layer, home=home) for row in trained}
        self._names = names_by_part(rows)

    def walk(self, ops: Any, parts: Iterable[str | int]) -> Iterator[Bundle]:
        """Yields each part's gradients, and reduces them when the next one's are asked for."""
        for part in parts:
            # The generator continues when the part's backward is recorded, so the reduction follows its last write.
            here = self.added_to(part)
            yield self.bundle(part, here)
            self.reduce(ops, part, here)

    def added_to(self, part: str | int) -> dict[str, Ref]:
        """By row name, what a part adds to."""
        return {name: self.refs[name] for name in self._names[part] if name in self.refs}

    def bundle(self, part: str | int, here: Mapping[str, Ref]) -> Bundle:
        """What a part writes, where `here` is what it adds to."""
        # None for a frozen row: an op skips an output that is not wanted, so block code needs no 'if'.
        return part_bundle({name: here.get(name) for name in self._names[part]}, part)

    def reduce(self, ops: Any, part: str | int, here: dict[str, Ref]) -> dict[str, Ref]:
        """Makes sums over ranks of what a part has written; returns what is to be kept of `here`: of one rank, all."""
        return here

    def sums(self, ops: Any) -> Iterator[Ref]:
        """Yields what the optimizer reads: the gradient of each trained row, in order."""
        yield from self.refs.values()

    def shares(self, ops: Any) -> Iterator[Ref]:
        """Yields what this rank adds to the norm of the whole gradient."""
        return self.sums(ops)


class StatePiece(NamedTuple):
    """One call of the optimizer; `first` is the place of the state's first element in the whole row.

    `rows` (start, count) are those that it has of what this rank has of the row; None: all. `grad` is the gradient
    where it was fetched with the state.
    """

    state: State
    first: int = 0
    rows: tuple[int, int] | None = None
    grad: Ref | None = None

    def of(self, ref: Ref | None) -> Ref | None:
        """The same piece of the row's weight, if copies of it are written, or gradient."""
        return ref if ref is None or self.rows is None else ref.chunk(*self.rows)


class Update(NamedTuple):
    """A row with the pieces of its state, which are asked for one after the other."""

    row: Row
    pieces: Iterable[StatePiece]


class ReplicatedMoments:
    """The state of all rows that are trained: a master, and each of `kinds` in its dtype.

    A master of the weights' dtype, or of a row that is held in 8 bits, is the weight itself.
    """

    def __init__(self, rows: Sequence[Row], master_dtype: str, kinds: Mapping[StateKind, str]) -> None:
        self.rows = tuple(row for row in rows if row.trainable)
        self.refs = {row.name: _state(row, master_dtype, kinds) for row in self.rows}

    def walk(self, ops: Any, *, masters_only: bool = False, only: Container[str] | None = None) -> Iterator[Update]:
        """Yields each row with its state as one piece; a resident store has nothing to move.
        `masters_only` when no other state is read; `only`: the rows of these names."""
        for row in self._of(only):
            yield Update(row, (StatePiece(self.refs[row.name]),))

    def _of(self, only: Container[str] | None) -> Iterator[Row]:
        return (row for row in self.rows if only is None or row.name in only)


def each_of(state: State, change: Callable[[Ref], Ref]) -> State:
    """A state with each of its tensors changed."""
    return {space: change(ref) for space, ref in state.items()}


def _state(row: Row, master_dtype: str, kinds: Mapping[StateKind, str]) -> State:
    """What is kept of a row."""
    return {MASTER: _master(row, master_dtype), **{kind.name: _ref(row, kind, kinds[kind]) for kind in kinds}}


def _master(row: Row, dtype: str) -> Ref:
    """The master of a row; that of one which is held in 8 bits is the weight."""
    # Two names for the same bytes would need a copy between them after each step.
    if row.stored is not None:
        return Ref(row.name, "weight", row.shape, dtype, row.layer, form=row.stored)
    return Ref(row.name, MASTER, row.shape, dtype, row.layer)


def _ref(row: Row, kind: StateKind, dtype: str) -> Ref:
    """A state of a row; one in 8 bits is a number of f32 in a form."""
    # Ops read and write f32; the form says how 8 bits stand for it, with a scale for each block of numbers.
    form = kind.form(dtype)
    return Ref(row.name, kind.name, row.shape, "fp32" if form else dtype, row.layer, form=form)


class Alone:
    """A run of one rank agrees with itself."""

    def cells(self, cells: Mapping[str, Ref]) -> dict[str, Ref]:
        """Where agreed numbers are, by the names of the cells of each rank: the same."""
        return dict(cells)

    def agree(self, ops: Any, cells: Mapping[str, Ref]) -> Mapping[str, Ref]:
        """The cells with the sums over ranks in place of each rank's own."""
        return cells

    def agree_on_largest(self, ops: Any, cells: Mapping[str, Ref]) -> Mapping[str, Ref]:
        """The cells with the largest requests and magnitudes of all ranks."""
        return cells

    def agree_on_amax(self, ops: Any, cells: Mapping[str, Ref]) -> Mapping[str, Ref]:
        """The cells with the largest magnitudes of all ranks."""
        return cells
