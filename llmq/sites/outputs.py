"""Outputs of a site that its pieces, of which some or all have gains, leave as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from llmq.tensor import Ref


class Outputs(Protocol):
    """Outputs [start, stop) of a site."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


def fill_gains(ops: Any, gain: Ref, pieces: Iterable[Outputs], outputs: int) -> None:
    """gain (N,) <- 1 for those of `outputs` that none of the `pieces`, which are in order, has."""
    end = 0
    for start, stop in (*((piece.start, piece.stop) for piece in pieces), (outputs, outputs)):
        if end < start:
            ops.output_gain(gain.flat(end, start - end), None, None, None, None, None, None, scale=1.0, first=0)
        end = stop
