"""How a quantized copy is scaled: the shape of its scales, how they are made, cut and spread over it, one class each.

A copy is stored as a matrix (R, K): a row form as the tensor is, a col form transposed. One scale for the whole lives
apart from the copy, and row and col copies of one dtype share it. Scales of rows, blocks and tiles are made with the
copy from the very numbers under each, stored beside it as cuBLASLt reads them, and live and die with it. Those that no
matmul reads (`HELD`) are of frozen weights alone.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from llmq.few_bits import DYNAMIC, MX_BLOCK, NESTED_BLOCK, NF4_BLOCK, SMALLEST_ABSMAX, nested

BLOCK = 128  # consecutive numbers of a row under one blockwise scale; rows and columns under a tilewise one
SMALLEST = np.finfo(np.float32).tiny  # of a scale: the reciprocal of a subnormal one would overflow


class Scaling:
    """One scale for the whole copy. `is_cell`: it is a persistent cell, made of the amax of earlier steps, so that a
    producer can write the copy at once; `is_measured`: a pass over the value makes it, before the copy; `owns_scales`:
    the scales belong to one copy; `is_repeated`: to read a copy, an array of scales as large as itself is made;
    `turns`: a transposed copy has the same scales, transposed;
    `is_tiled`: no scale is that of rows in two tiles of 128; `is_of_states`: optimizer states are held so, and nothing
    else. `dtype` is that of the scales."""

    dtype = "fp32"
    is_repeated = False
    is_tiled = False
    is_of_states = False
    owns_scales = False
    turns = True

    def __init__(self, *, is_cell: bool = False, is_measured: bool = False) -> None:
        self.is_cell, self.is_measured = is_cell, is_measured

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Shape of the scales of a copy stored as (rows, columns)."""
        return (1,)

    def amax(self, size: np.ndarray) -> np.ndarray:
        """Largest magnitude under each scale, in the shape of the scales; `size` (R, K) are magnitudes."""
        return size.max(keepdims=True, initial=0).reshape(1)

    def made(self, amax: np.ndarray, limit: float) -> np.ndarray:
        """The scales of the largest magnitudes under each, where `limit` is the largest number of the format."""
        return scale_from(amax, np.float32(limit), np.float32(1))

    def spread(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Scales, or their reciprocals, of a copy stored in `shape`, so that they multiply it number by number."""
        return scale

    def inverse(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """What multiplies a value stored in `shape` to give the copy: one f32 reciprocal per scale."""
        return self.spread(np.float32(1) / scale, shape)

    def turned(self, scale: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """The scales of the transpose of a copy stored as (rows, columns), where it `turns`."""
        return scale

    def of_rows(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        """The scales of stored rows [start, start + count); None where they do not lie together."""
        return scale

    def of_columns(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        """The scales of stored columns [start, start + count); None where they do not lie together."""
        return scale


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


class Blocks(Rowwise):
    """(R, K / width), rounded up: one for `width` numbers of a stored row, row by row, so that rows are cut with their
    scales: shares of ranks, and pieces that come from the host, are whole."""

    is_repeated = True
    is_of_states = True
    width = BLOCK

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (rows, -(-columns // self.width))

    def amax(self, size: np.ndarray) -> np.ndarray:
        return np.maximum.reduceat(size, np.arange(0, size.shape[1], self.width), axis=1)

    def spread(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.repeat(scale, self.width, axis=1)[:, : shape[-1]].reshape(shape)

    def of_columns(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        return None


class Powers(Blocks):
    """Blocks whose scales are powers of two: a number that does not change keeps its value when the scale does, or
    nearly so where it is among the smallest."""

    def made(self, amax: np.ndarray, limit: float) -> np.ndarray:
        scale = super().made(amax, limit)
        return ((scale.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000)).view(np.float32)


class Blockwise(Blocks):
    """(K / 128, R), rounded up: those of blocks as a matmul reads them, transposed."""

    is_tiled = False
    is_of_states = False

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return super().shape(rows, columns)[::-1]

    def amax(self, size: np.ndarray) -> np.ndarray:
        return super().amax(size).T

    def spread(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return super().spread(scale.T, shape)

    def of_rows(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        return None

    def of_columns(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        return _of_blocks(scale, start, count)


class Tilewise(Blocks):
    """(R / 128, K / 128), rounded up, the last one to a multiple of 4: one for 128 x 128 numbers."""

    is_of_states = False
    turns = True

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (-(-rows // BLOCK), -(-columns // (4 * BLOCK)) * 4)

    def amax(self, size: np.ndarray) -> np.ndarray:
        found = np.maximum.reduceat(super().amax(size), np.arange(0, size.shape[0], BLOCK), axis=0)
        return np.pad(found, ((0, 0), (0, -found.shape[1] % 4)))

    def turned(self, scale: np.ndarray, rows: int, columns: int) -> np.ndarray:
        tiles = scale[:, : -(-columns // BLOCK)].T
        return np.pad(tiles, ((0, 0), (0, -tiles.shape[1] % 4)), constant_values=1)  # as of amax 0

    def spread(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return super().spread(np.repeat(scale, BLOCK, axis=0)[: math.prod(shape[:-1])], shape)

    def of_rows(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        return _of_blocks(scale, start, count)


class Exponents(Blocks):
    """Blocks of 32, uint8: for each the power of two 2^(e - 127), 255 for NaN (e8m0).

    It is that of the block's largest magnitude, over that of the format's largest number.
    """

    dtype = "uint8"
    is_tiled = False
    is_of_states = False
    width = MX_BLOCK

    def made(self, amax: np.ndarray, limit: float) -> np.ndarray:
        largest = math.frexp(limit)[1]
        exponents = np.clip(np.frexp(amax)[1] - largest + 127, 0, 254)
        return np.where(amax > 0, np.where(np.isfinite(amax), exponents, 255), 0).astype(np.uint8)

    def spread(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        powers = np.ldexp(np.float32(1), np.minimum(scale, 254).astype(np.int32) - 127)
        return super().spread(np.where(scale == 255, np.float32(np.nan), powers), shape)

    def inverse(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.float32(1) / self.spread(scale, shape)


class Absmax(Rowwise):
    """(R K / 64,): of 64 consecutive numbers of the matrix the largest magnitude, of which NF4's levels are shares."""

    is_repeated = True
    is_tiled = False

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (-(-rows * columns // NF4_BLOCK),)

    def amax(self, size: np.ndarray) -> np.ndarray:
        return size.reshape(-1, NF4_BLOCK).max(axis=1)

    def made(self, amax: np.ndarray, limit: float) -> np.ndarray:
        return amax

    def spread(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return np.repeat(scale, NF4_BLOCK).reshape(shape)

    def inverse(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return self.spread(np.float32(1) / np.maximum(scale, SMALLEST_ABSMAX), shape)

    def of_rows(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        return None

    def of_columns(self, scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
        return None


class Nested(Scaling):
    """One byte for 64 consecutive numbers of the matrix, less a mean, under an f32 scale of `group` bytes: NF4's.

    All of it is one array of bytes: the 256 numbers that a byte stands for; for each group its scale and the mean;
    then the bytes. A scale covers 256 bytes of one tensor of a file; groups are smaller where a row is fused of
    tensors that have no whole number of such, and repeat what they share.
    """

    dtype = "uint8"
    owns_scales = True
    is_repeated = True
    turns = False

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        blocks = -(-rows * columns // NF4_BLOCK)
        return (DYNAMIC.nbytes + 8 * -(-blocks // self.group) + blocks,)

    def stored(self, absmax: np.ndarray, borders: Sequence[int]) -> np.ndarray:
        """The bytes that stand for the scales `absmax` (n,), each tensor's, between `borders`, for itself."""
        tables, codes = [], []
        for start, stop in pairwise(borders):
            found, scales, offset = nested(absmax[start:stop])
            repeated = np.repeat(scales, NESTED_BLOCK // self.group)[: -(-(stop - start) // self.group)]
            tables.append(np.stack([repeated, np.full_like(repeated, offset)], axis=1))
            codes.append(found)
        return np.concatenate([part.reshape(-1).view(np.uint8) for part in (DYNAMIC, *tables, *codes)])

    def absmax(self, scale: np.ndarray, blocks: int) -> np.ndarray:
        """The scales (blocks,) in f32 that the bytes stand for."""
        numbers, codes = scale[: len(scale) - blocks].view(np.float32), scale[len(scale) - blocks :]
        table = np.repeat(numbers[len(DYNAMIC) :].reshape(-1, 2), self.group, axis=0)[:blocks]
        return numbers[codes] * table[:, 0] + table[:, 1]

    def spread(self, scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape)
        return np.repeat(self.absmax(scale, -(-size // NF4_BLOCK)), NF4_BLOCK)[:size].reshape(shape)


SCALINGS: dict[str, Scaling] = {
    # From the amax of earlier steps: nothing is measured before the copy is written, which may saturate.
    "delayed": Scaling(is_cell=True),
    # From the value itself, in a pass of its own over it: exact, and one more read.
    "current": Scaling(is_measured=True),
    "rowwise": Rowwise(),
    "blockwise": Blockwise(),
    "tilewise": Tilewise(),
    "blocks": Blocks(),
    "powers": Powers(),
}
HELD: dict[str, Scaling] = {
    "exponents": Exponents(),
    "absmax": Absmax(),
    **{f"nested{group}": Nested(group) for group in (2**power for power in range(9))},
}


def scale_from(amax: np.ndarray, limit: np.ndarray | np.float32, otherwise: np.ndarray | np.float32) -> np.ndarray:
    """amax / limit (f32) where amax is finite and not 0, elsewhere `otherwise`."""
    return np.where((amax > 0) & np.isfinite(amax), np.maximum(amax / limit, SMALLEST), otherwise)


def _of_blocks(scale: np.ndarray, start: int, count: int) -> np.ndarray | None:
    """Of scales whose first axis is of blocks, those of numbers [start, start + count); None inside a block."""
    return None if start % BLOCK else scale[start // BLOCK : -(-(start + count) // BLOCK)]
