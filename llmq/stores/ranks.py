"""What the ranks of a run agree on before an update: sums over all of them, in cells beside those of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmq.stores.sharding import Bounds
from llmq.tensor import Ref

LARGEST = ("amax", "request")  # over all ranks; others are summed


class Alone:
    """A run of one rank agrees with itself."""

    def cells(self, cells: Mapping[str, Ref]) -> dict[str, Ref]:
        """Where agreed numbers are, by the names of the cells of each rank: the same."""
        return dict(cells)

    def agree(self, ops: Any, cells: Mapping[str, Ref]) -> Mapping[str, Ref]:
        """The cells with what is agreed in place of each rank's own."""
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
        names = [name for name in ("loss", "tokens", *LARGEST) if name in cells]
        agreed = {name: replace(cells[name], name=f"agreed.{name}", space="cell") for name in names}
        partials = replace(cells["partials"], name="agreed.partials", shape=(self._tiles[-1], 1))
        return {**cells, **agreed, "partials": partials}

    def agree(self, ops: Any, cells: Mapping[str, Ref]) -> Mapping[str, Ref]:
        """The cells with what is agreed in place of each rank's own."""
        agreed = self.cells(cells)
        ops.all_gather(agreed["partials"], cells["partials"], bounds=self._tiles)
        for name in ("loss", "tokens", "request"):
            ops.all_reduce(agreed[name], cells[name], largest=name in LARGEST)
        self.agree_on_amax(ops, cells)
        return agreed

    def agree_on_amax(self, ops: Any, cells: Mapping[str, Ref]) -> Mapping[str, Ref]:
        """The cells with the largest magnitudes of all ranks; nothing is called in a run without delayed scales."""
        agreed = self.cells(cells)
        if "amax" in cells:
            ops.all_reduce(agreed["amax"], cells["amax"], largest=True)
        return agreed
