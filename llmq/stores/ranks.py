"""What the ranks of a run agree on before an update: sums over all of them, in cells beside those of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmq.stores.sharding import Bounds
from llmq.tensor import Ref

SUMMED, LARGEST = ("loss", "tokens"), ("amax", "request")  # over all ranks


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

    def agree(self, ops: Any, cells: Mapping[str, Ref]) -> Mapping[str, Ref]:
        """The cells with the sums over ranks in place of each rank's own."""
        agreed = self.cells(cells)
        # Gathered, not summed: the norm adds all partial sums in one order, so it has the bits of any number of ranks.
        ops.all_gather(agreed["partials"], cells["partials"], bounds=self._tiles)
        for name in SUMMED:
            ops.all_reduce(agreed[name], cells[name], largest=False)
        return agreed

    def agree_on_largest(self, ops: Any, cells: Mapping[str, Ref]) -> Mapping[str, Ref]:
        """The cells with the largest requests and magnitudes of all ranks."""
        # The largest wins: exit codes are above 1, which asks for a checkpoint, so an end outranks a save.
        ops.all_reduce(self.cells(cells)["request"], cells["request"], largest=True)
        return self.agree_on_amax(ops, cells)

    def agree_on_amax(self, ops: Any, cells: Mapping[str, Ref]) -> Mapping[str, Ref]:
        """The cells with the largest magnitudes of all ranks; nothing is called in a run without delayed scales."""
        agreed = self.cells(cells)
        if "amax" in cells:
            ops.all_reduce(agreed["amax"], cells["amax"], largest=True)
        return agreed
