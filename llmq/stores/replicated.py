"""The stores of a run whose ranks hold everything: weights, gradients, optimizer states, and what a step agrees on.

Other stores are subclasses of these, or wrap them. What they yield of a part of the model is a `Bundle`:
`w.up.weight`, with None for what a model lacks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llmq.optimizers.rule import MASTER, State, StateKind
from llmq.row import Row
from llmq.stores.sharding import part_of
from llmq.tensor import IN_MASTER, OWN, Ref

TIED = ("weight", "added")  # rows of the embedding that a tied head reads


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
    tied = {f"head.{name}": refs[f"embed.{name}"] for name in TIED if f"embed.{name}" in refs}
    found = bundle_tree({**tied, **refs})
    for name in ("layers", str(part)) if isinstance(part, int) else (part,):
        found = found._children.get(name) or Bundle()
    return found


def names_by_part(rows: Iterable[Row]) -> dict[str | int, list[str]]:
    """Names of the rows that each part of a model reads; a tied head reads the embedding."""
    found = defaultdict(list)
    for row in rows:
        found[part_of(row)].append(row.name)
    if "head.weight" not in found["head"]:
        found["head"] += [name for name in found["embed"] if name in {f"embed.{one}" for one in TIED}]
    return found


class ReplicatedWeights:
    """Refs of all parameters in `dtype`; one whose master has the same dtype is its own master. A frozen row has none,
    and is held in its own dtype, if it has one."""

    def __init__(
        self, rows: Sequence[Row], dtype: str, master_dtype: str | None, host_master: str | None = None
    ) -> None:
        self.rows, self._master_dtypes = rows, {"device": master_dtype, "host": host_master}
        self.refs = {row.name: self._ref(row, row.dtype or dtype) for row in rows}
        self._names = names_by_part(rows)

    def walk(self, ops: Any, parts: Iterable[str | int], phase: str) -> Iterator[tuple[str | int, Bundle]]:
        """Yields (part, bundle) in the order given."""
        for part in parts:
            yield part, part_bundle({name: self.refs[name] for name in self._names[part]}, part)

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
        for row in self.rows:
            if row.trainable and (only is None or row.name in only):
                # A row without a wider master is updated in its own form: there is no copy to write.
                yield self.refs[row.name] if row.stored is None else None

    def frozen(self) -> list[Ref]:
        """The rows that are not trained and whose copies are made once, of their value."""
        return [self.refs[row.name] for row in self.rows if not row.trainable and row.stored is None]

    def _ref(self, row: Row, dtype: str) -> Ref:
        is_master = row.trainable and dtype == self._master_dtypes[row.home]
        origin = IN_MASTER if is_master else OWN
        return Ref(row.name, "weight", row.shape, dtype, row.layer, form=row.stored, home=row.home, origin=origin)


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
        self.refs: dict[str, State] = {
            row.name: {MASTER: _master(row, master_dtype)} | {kind.name: _ref(row, kind, kinds[kind]) for kind in kinds}
            for row in self.rows
        }

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

    def agree(self, ops: Any, cells: Mapping[str, Ref], *names: str) -> Mapping[str, Ref]:
        """The cells with what all ranks have found in place of what each has, once the cells `names` are agreed on."""
        return cells
