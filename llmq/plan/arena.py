"""Where bytes live: lifetimes become offsets in one block of memory."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

ALIGNMENT = 256  # bytes; what cuBLASLt workspaces and 16-byte vector accesses ask for, with room


class Lifetime(NamedTuple):
    """`size` bytes that must not move from call `first` to call `last`, both included."""

    size: int
    first: int
    last: int


def aligned(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def lay_out(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Offsets such that no two live at the same call overlap, and the bytes of the whole.

    Greedy by size: the largest first, each at the lowest offset that is free for its whole life.
    """
    offsets, total = _laid_out(tuple(lifetimes))
    return list(offsets), total


@lru_cache(maxsize=16)  # most programs of a plan have the same lifetimes as another one
def _laid_out(lifetimes: tuple[Lifetime, ...]) -> tuple[list[int], int]:
    offsets, total = [0] * len(lifetimes), 0
    lives = [(aligned(life.size), life.first, life.last) for life in lifetimes]
    # What is placed, by offset: where it begins and ends, and its first and last call.
    placed = np.empty((4, len(lives)), np.int64)
    # Large ones first: small ones fit into the gaps between them, and not the other way round.
    for count, index in enumerate(sorted(range(len(lives)), key=lambda i: (-lives[i][0], lives[i][1], i))):
        size, first, last = lives[index]
        begins, ends, firsts, lasts = placed[:, :count]
        # Only what is alive at the same time can be in the way.
        (rivals,) = ((firsts <= last) & (lasts >= first)).nonzero()
        offset = 0
        if rivals.size:
            # taken[i]: everything below is, by the first i + 1 rivals
            starts, taken = begins[rivals], np.maximum.accumulate(ends[rivals])
            if starts[0] < size:
                (fits,) = (starts[1:] - taken[:-1] >= size).nonzero()
                offset = int(taken[fits[0] if fits.size else -1])
        at = int(begins.searchsorted(offset, "right"))
        placed[:, at + 1 : count + 1] = placed[:, at:count].copy()
        placed[:, at] = offset, offset + size, first, last
        offsets[index], total = offset, max(total, offset + size)
    return offsets, total


def live_peak(lifetimes: Sequence[Lifetime]) -> int:
    """Most bytes alive at one call: what no layout can go below."""
    if not lifetimes:
        return 0
    change = np.zeros(max(life.last for life in lifetimes) + 2, np.int64)
    for life in lifetimes:
        change[life.first] += aligned(life.size)
        change[life.last + 1] -= aligned(life.size)
    return int(np.cumsum(change).max())
