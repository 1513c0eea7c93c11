"""Outputs of a site that its pieces, of which some or all have gains, leave unchanged."""

from collections.abc import Iterable

from llmq.protocols import Ops
from llmq.tensor import Ref

Columns = tuple[int, int]  # the first one, and how many


def gaps(pieces: Iterable[Columns], outputs: int) -> list[Columns]:
    """Those of `outputs` that none of the `pieces`, which are in order, has."""
    found, end = [], 0
    for start, count in (*pieces, (outputs, 0)):
        found += [(end, start - end)] if end < start else []
        end = start + count
    return found


def fill_gains(ops: Ops, gain: Ref, columns: Iterable[Columns]) -> None:
    """gain (N,) <- 1 at these columns."""
    for start, count in columns:
        # With nothing given the gain is 1: one kernel for gains of every kind.
        ops.output_gain(gain.flat(start, count), None, None, None, None, None, None, scale=1.0, first=0)
