"""Where bytes live: lifetimes become offsets in one block of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmq.tensor import DTYPES, Ref

ALIGNMENT = 256  # bytes; what cuBLASLt workspaces and 16-byte vector accesses ask for, with room


@dataclass(frozen=True)
class Lifetime:
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
    count = len(lifetimes)
    sizes = np.array([aligned(life.size) for life in lifetimes], np.int64)
    firsts = np.array([life.first for life in lifetimes], np.int64)
    lasts = np.array([life.last for life in lifetimes], np.int64)
    offsets = np.zeros(count, np.int64)
    placed = np.zeros(count, bool)
    for index in sorted(range(count), key=lambda i: (-int(sizes[i]), int(firsts[i]), i)):
        rivals = np.flatnonzero(placed & (firsts <= lasts[index]) & (lasts >= firsts[index]))
        rivals = rivals[np.argsort(offsets[rivals], kind="stable")]
        starts = offsets[rivals]
        # everything below ends[i] is taken by the first i rivals
        ends = (
            np.concatenate([[0], np.maximum.accumulate(starts + sizes[rivals])])
            if rivals.size
            else np.zeros(1, np.int64)
        )
        fits = np.flatnonzero(starts - ends[:-1] >= sizes[index])
        offsets[index] = ends[fits[0]] if fits.size else ends[-1]
        placed[index] = True
    return [int(x) for x in offsets], int((offsets + sizes).max(initial=0))


def live_peak(lifetimes: Sequence[Lifetime]) -> int:
    """Most bytes alive at one call: what no layout can go below."""
    if not lifetimes:
        return 0
    change = np.zeros(max(life.last for life in lifetimes) + 2, np.int64)
    for life in lifetimes:
        change[life.first] += aligned(life.size)
        change[life.last + 1] -= aligned(life.size)
    return int(np.cumsum(change).max())


def stored_dtype(ref: Ref) -> np.dtype:
    """Dtype of the bytes that a Ref stands for."""
    return DTYPES[ref.form.dtype if ref.form else ref.dtype]
