"""How tensors that live on the host are cut into what is on the device at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable

from llmq.tensor import NORM_ROWS, Ref, stored_bytes

MOST_PIECES = 4096  # of all that is fetched, about: each takes a handful of calls to plan, to bind and to capture


def size_of_pieces(refs: Iterable[Ref], least_bytes: int) -> int:
    """Bytes of a piece of these tensors: `least_bytes`, and more where there would be too many."""
    return max(least_bytes, sum(map(stored_bytes, refs)) // MOST_PIECES)


def chunks_of_tiles(ref: Ref, row_bytes: int, num_bytes: int) -> list[tuple[int, int]]:
    """(start, count) of the rows of each piece of a tensor, `row_bytes` a row: at most `num_bytes`, in whole tiles of
    NORM_ROWS rows and one at least. A vector, and an entry of a stack, is one piece."""
    rows = math.prod(ref.shape[:-1])
    # One tile at least, even of a row wider than a piece: a part of a tile would change partial sums and scales.
    size = NORM_ROWS * max(1, num_bytes // max(1, NORM_ROWS * row_bytes))
    if len(ref.shape) == 1 or ref.stack is not None or rows <= size:
        return [(0, rows)]
    return [(start, min(size, rows - start)) for start in range(0, rows, size)]
