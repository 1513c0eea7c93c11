"""Weights that every rank holds whole, on the device or the host: the copies that matmuls and norms read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from llmq.row import Row
from llmq.scaling import HELD
from llmq.stores.bundles import Bundle, names_by_part, one_ahead, part_bundle, part_tree
from llmq.stores.moments import MASTER_FORM
from llmq.tensor import Ref

HOLDING = {"e4m3": ("current", "tilewise", "powers"), "int8": ("rowwise",)}  # scalings of what is held, by dtype


class ReplicatedWeights:
    """Refs of all parameters in `dtype`; one whose master has the same dtype is its own master, unless masters are
    others' (None).

    Rows that are `hosted` live on the host, in the forms that are read of them: each walk brings them into slots, so
    that those of two parts are on the device. `host_master` is the dtype of masters on the host (None: they are on the
    device): a weight of that dtype is its own master there.

    A frozen row has no master. It is held in its own dtype, if it has one, or in a form: then every other form that is
    read comes from a slot, cast a part of the model at a time. So is a trained row that has no wider master.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        dtype: str,
        master_dtype: str | None,
        *,
        hosted: Callable[[Row], bool] | None = None,
        host_master: str | None = None,
    ) -> None:
        self.rows = tuple(replace(row, home="host") if hosted and hosted(row) else row for row in rows)
        self._master_dtypes = {"device": master_dtype, "host": host_master}
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
            yield part, part_bundle(part_tree({**refs, **here, **made}), part)

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
        refs = (self.refs[row.name].entries if row.stored is None else (None,) for row in rows)
        return written_here(ops, chain.from_iterable(refs))

    def frozen(self) -> list[Ref]:
        """The rows that are not trained and whose copies are made once, of their value."""
        rows = [row for row in self.rows if not row.trainable and row.stored is None]
        return [ref for row in rows for ref in self.refs[row.name].entries]

    def _ref(self, row: Row, dtype: str) -> Ref:
        if row.stored is not None:
            _refuse(row)
        is_master = row.trainable and (row.dtype or dtype) == self._master_dtypes[row.home]
        value_in = "master" if is_master else None
        about: dict[str, Any] = {"form": row.stored, "home": row.home, "value_in": value_in, "is_stack": row.stacked}
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
        about: dict[str, Any] = {"cell": cell, "held": held, "is_stack": held.is_stack}
        slot = Ref(f"{phase}/{held.name}", "activation", held.shape, held.dtype, held.layer, **about)
        for one, source in zip(slot.entries, held.entries, strict=True):
            ops.cast(one, source)
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


def _refuse(row: Row) -> None:
    """ValueError for a row that cannot be held in its form."""
    form = row.stored
    assert form is not None
    if row.trainable and form != MASTER_FORM:
        raise ValueError(f"{row.name} is trained, so it cannot be held in {form.key}: freeze it")
    if row.layer is None or row.site is None or len(row.shape) - row.stacked != 2:
        raise ValueError(f"{row.name} is no weight of a layer's linear map, so it cannot be held in {form.key}")
    if form.layout != "row" or not (form.scaling in HELD or form.scaling in HOLDING.get(form.dtype, ())):
        raise ValueError(
            f"{row.name} cannot be held in {form.key}: use rows of fp8 with a scale of the whole (current) or of tiles "
            "(tilewise), of int8 with a scale each (rowwise), of nf4 or mxfp4"
        )
