"""Weights that come into slots for each use: from the host, cast of what is held in a form, or made of their masters.

A part's are there while it is used, and those of the next part on their way.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeVar

from llmq.row import Row
from llmq.stores.replicated import Bundle, ReplicatedWeights, part_bundle
from llmq.tensor import Form, Origin, Ref, changed

Fetched = TypeVar("Fetched")
COUNTED = "update"  # in the names of copies that are made for their scales and statistics alone
# The form of a trained weight that has no wider master: the optimizer updates it in its place.
MASTER_FORM = Form("e4m3", "row", "powers")


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


class FetchedWeights(ReplicatedWeights):
    """Weights of which some rows live on the host by their `homes`, in the forms that are read of them: each walk
    brings them into slots, so that those of two parts are on the device. A weight of the dtype of masters there is its
    own master; none is if masters are others' (None).

    A frozen row may be held in a form: then every other form that is read comes from a slot, cast a part of the model
    at a time. So is a trained row that has no wider master.
    """

    def __init__(self, rows: Sequence[Row], dtype: str, master_dtype: str | None, homes: Homes = ALL_HERE) -> None:
        hosted = homes.hosted
        placed = tuple(replace(row, home="host") if hosted and hosted(row) else row for row in rows)
        super().__init__(placed, dtype, master_dtype, homes.host_master)
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

    def written(self, ops: Any, only: Container[str] | None = None) -> Iterator[Ref | None]:
        """Yields what the copies of each trained row are written to, a slot for one of the host."""
        return written_here(ops, super().written(ops, only))

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
        """What a part's rows that are held in a form are read from, by name: slots with every form of these, which
        never change, so that their single scale is known. What has been `fetched` is there."""
        made = {}
        for held in self._held[part]:
            # fp8 that is stored with a scale for each tile has none for the whole.
            is_tiled = held.form is not None and held.form.dtype == "e4m3" and held.form.owns_scales
            slot = changed(weight_slot(held, phase), origin=Origin(held=held, cell=None if is_tiled else held.name))
            ops.cast(slot, held)
            made[held.name] = slot
        return made


def weight_slot(ref: Ref, phase: str) -> Ref:
    """A slot for what is read of a weight, or written, in a phase."""
    # The scale cell is the row's own: a slot lives for one use, and a delayed scale needs the history of all of them.
    return Ref(f"{phase}/{ref.name}", "activation", ref.shape, ref.dtype, ref.layer, origin=Origin(cell=ref.name))


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


class RemadeWeights(FetchedWeights):
    """Weights of which the rows that are `remade` have no copies of their own: each walk makes those of a part, of
    their masters of `own_dtype`, which come a part ahead where they live on the host, unless they are read `in_place`.

    The update makes a copy of each row that nothing reads, for its scale and its statistics: they are those of copies
    that stay.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        dtype: str,
        master_dtype: str | None,
        homes: Homes,
        *,
        remade: Callable[[Row], bool],
        own_dtype: str,
        in_place: bool,
    ) -> None:
        super().__init__(rows, dtype, master_dtype, homes)
        self._in_place, home = in_place, "device" if homes.host_master is None else "host"
        self._masters = {
            row.name: Ref(row.name, "master", row.shape, own_dtype, row.layer, home=home)
            for row in self.rows
            if remade(row)
        }

    def written(self, ops: Any, only: Container[str] | None = None) -> Iterator[Ref | None]:
        """Yields what the copies of each trained row are written to, or the one that is only counted."""
        for ref in super().written(ops, only):
            # Nothing reads this copy, so it keeps no memory; making it measures the amax for the next scale.
            yield weight_slot(ref, COUNTED) if ref is not None and ref.name in self._masters else ref

    def _fetch(self, ops: Any, part: str | int, phase: str) -> dict[str, Ref]:
        slots = super()._fetch(ops, part, phase)
        for name, master in self._masters.items():
            if master.layer == part and master.home == "host" and not self._in_place:
                slots[name] = Ref(f"{phase}/master/{name}", "activation", master.shape, master.dtype, master.layer)
                ops.copy_to_device(slots[name], master)
        return slots

    def _slots(self, ops: Any, part: str | int, phase: str, fetched: dict[str, Ref]) -> dict[str, Ref]:
        made = super()._slots(ops, part, phase, fetched)
        for name, master in self._masters.items():
            if master.layer == part:
                # Marked, so that it has the scale that the update has left, and collects no statistics a second time.
                made[name] = changed(weight_slot(self.refs[name], phase), origin=Origin(cell=name, is_remade=True))
                ops.cast(made[name], fetched.get(name, master))
        return made
