"""How an fp8 copy is scaled: the shape of its scales, how they are made, cut and spread over the copy, one class each.

A copy is stored as a matrix (R, K): a row form as the tensor is, a col form transposed. One scale for the whole lives
apart from the copy, and row and col copies of one dtype share it. Scales of rows, blocks and tiles are made with the
copy from the very numbers under each, stored beside it as cuBLASLt reads them, and live and die with it.
"""

from __future__ import annotations

import math

import numpy as np

BLOCK = 128  # consecutive numbers of a row under one blockwise scale; rows and columns under a tilewise one
SMALLEST = np.finfo(np.float32).tiny  # of a scale: the reciprocal of a subnormal one would overflow


class Scaling:
    """One scale for the whole copy. `is_cell`: it is a persistent cell, made of the amax of earlier steps, so that a
    producer can write the copy at once; `is_measured`: a pass over the value makes it, before the copy; `owns_scales`:
    the scales belong to one copy; `is_repeated`: to read a copy, an array of scales as large as itself is made;
    `turns`: a transposed copy has the same scales, transposed;
    `is_tiled`: no scale is that of rows in two tiles of 128; `is_of_states`: optimizer states are held so, and nothing
    else."""

    is_cell = False
    is_measured = False
    is_repeated = False
    is_tiled = False
    is_of_states = False
    owns_scales = False
    turns = True

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of the scales of a copy stored as (rows, columns)."""
        return (1,)

    def amax(self, size: np.ndarray) -> np.ndarray:
        """Largest magnitude under each scale, in the shape of the scales; `size` (R, K) are magnitudes."""
        return size.max(keepdims=True, initial=0).reshape(1)

    def rounded(self, scale: np.ndarray) -> np.ndarray:
        """Scales as they are used: those that map a largest magnitude to the limit, or larger ones."""
        return scale

    def spread(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Scales, or their reciprocals, of a copy stored in `shape`, so that they multiply it number by number."""
        return scale

    def turned(self, scale: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """The scales of the transpose of a copy stored as (rows, columns), where it `turns`."""
        return scale

    def of_rows(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        """The scales of stored rows [start, start + count); None where they do not lie together."""
        return scale

    def of_columns(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        """The scales of stored columns [start, start + count); None where they do not lie together."""
        return scale


class Delayed(Scaling):
    """From the amax of earlier steps: nothing is measured before the copy is written, which may saturate."""

    is_cell = True


class Current(Scaling):
    """From the value itself, in a pass of its own over it: exact, and one more read."""

    is_measured = True


class Rowwise(Scaling):
    """(R,): one for each stored row."""

    owns_scales = True
    is_tiled = True
    turns = False

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (rows,)

    def amax(self, size: np.ndarray) -> np.ndarray:
        return size.max(axis=1)

    def spread(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return scale.reshape(*shape[:-1], 1)

    def of_rows(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        return scale[start : start + count]


class Blockwise(Rowwise):
    """(K / 128, R), rounded up: one for 128 numbers of a stored row."""

    is_repeated = True
    is_tiled = False

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (-(-columns // BLOCK), rows)

    def amax(self, size: np.ndarray) -> np.ndarray:
        return _blocks(size).T

    def spread(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.repeat(scale.T, BLOCK, axis=1)[:, : shape[-1]].reshape(shape)

    def of_rows(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        return None

    def of_columns(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        return None if start % BLOCK else scale[start // BLOCK : -(-(start + count) // BLOCK)]


class Blocks(Rowwise):
    """(R, K / 128), rounded up: one for 128 numbers of a stored row, row by row, so that rows and their scales are cut
    together: shares of ranks, and pieces that come from the host, are whole."""

    is_repeated = True
    is_of_states = True

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (rows, -(-columns // BLOCK))

    def amax(self, size: np.ndarray) -> np.ndarray:
        return _blocks(size)

    def spread(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.repeat(scale, BLOCK, axis=1)[:, : shape[-1]].reshape(shape)

    def of_columns(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        return None


class Powers(Blocks):
    """Blocks whose scales are powers of two: a number that does not change keeps its value when the scale does, or
    nearly so where it is among the smallest."""

    def rounded(self, scale: np.ndarray) -> np.ndarray:
        return ((scale.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000)).view(np.float32)


class Tilewise(Blockwise):
    """(R / 128, K / 128), rounded up, the last one to a multiple of 4: one for 128 x 128 numbers."""

    turns = True
    is_tiled = True

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (-(-rows // BLOCK), -(-columns // (4 * BLOCK)) * 4)

    def amax(self, size: np.ndarray) -> np.ndarray:
        found = np.maximum.reduceat(_blocks(size), np.arange(0, size.shape[0], BLOCK), axis=0)
        return np.pad(found, ((0, 0), (0, -found.shape[1] % 4)))

    def turned(self, scale: np.ndarray, rows: int, columns: int) -> np.ndarray:
        tiles = scale[:, : -(-columns // BLOCK)].T
        return np.pad(tiles, ((0, 0), (0, -tiles.shape[1] % 4)), constant_values=1)  # as of amax 0

    def spread(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        rows = math.prod(shape[:-1])
        return super().spread(np.repeat(scale, BLOCK, axis=0)[:rows].T, shape)

    def of_rows(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        return None if start % BLOCK else scale[start // BLOCK : -(-(start + count) // BLOCK)]

    def of_columns(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        return None


SCALINGS: dict[str, Scaling] = {
    "delayed": Delayed(),
    "current": Current(),
    "rowwise": Rowwise(),
    "blockwise": Blockwise(),
    "tilewise": Tilewise(),
    "blocks": Blocks(),
    "powers": Powers(),
}


def scale_from(amax: np.ndarray, limit: np.ndarray | np.float32, otherwise: np.ndarray | np.float32) -> np.ndarray:
    """amax / limit (f32) where amax is finite and not 0, elsewhere `otherwise`."""
    return np.where((amax > 0) & np.isfinite(amax), np.maximum(amax / limit, SMALLEST), otherwise)


def _blocks(size: np.ndarray) -> np.ndarray:
    """(R, K / 128): the largest of each 128 numbers of a row."""
    return np.maximum.reduceat(size, np.arange(0, size.shape[1], BLOCK), axis=1)
