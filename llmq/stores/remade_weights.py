"""Weights whose e4m3 copies are made of their masters for each use, and are gone after it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from llmq.row import Row
from llmq.stores.replicated import Homes, ReplicatedWeights, weight_slot
from llmq.tensor import Ref, changed

COUNTED = "update"  # in the names of copies that are made for their scales and statistics alone


class RemadeWeights(ReplicatedWeights):
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
                made[name] = changed(weight_slot(self.refs[name], phase), is_remade=True)
                ops.cast(made[name], fetched.get(name, master))
        return made
