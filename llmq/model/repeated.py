"""Values that are one block of numbers over and over, which a device can make by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Repeated:
    """An array of `shape` whose flat numbers are those of `block` (n,) from number `first` on, over and over; its
    rows from `stop` on are zero. `np.asarray` makes it."""

    block: np.ndarray
    shape: tuple[int, ...]
    stop: int
    first: int = 0

    @property
    def size(self) -> int:
        """Numbers."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Repeated:
        """Some rows, one after the other."""
        start, stop, step = rows.indices(len(self))
        assert step == 1
        width = math.prod(self.shape[1:])
        return Repeated(
            self.block, (max(stop - start, 0), *self.shape[1:]), max(self.stop - start, 0), self.first + start * width
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = np.resize(np.roll(self.block, -(self.first % self.block.size)), self.shape)
        value[self.stop :] = 0
        return value if dtype is None else value.astype(dtype, copy=False)
