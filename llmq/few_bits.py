"""Numbers of 4 bits, two to a byte, in which frozen weights are held, and the bytes of NF4's own scales.

NF4 (Dettmers et al., "QLoRA", 2023) has 16 levels, the quantiles of a normal distribution; its bytes are those of
bitsandbytes 0.50, codes and scales alike. MXFP4 is e2m1 with a power of two for 32 numbers of a row (OCP
Microscaling Formats 1.0, 2023), its first number in the low half of a byte, as in the files of gpt-oss.
"""

from collections.abc import Callable

import numpy as np

NF4_BLOCK = 64  # consecutive numbers under one scale
NESTED_BLOCK = 256  # consecutive scales, less their mean, under one scale of their own
MX_BLOCK = 32  # consecutive numbers of a row under one exponent
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
LEVELS = {"nf4": NF4, "mxfp4": np.concatenate([E2M1, -E2M1])}  # by code
FIRST_SHIFT = {"nf4": 4, "mxfp4": 0}  # where in a byte the first of two numbers is
SMALLEST_ABSMAX = np.float32(1e-38)  # that numbers of NF4 are divided by
SUMMED = 1024  # sums side by side, of which a mean is made


def _pairs(dtype: str) -> np.ndarray:
    """(256, 2): the two numbers of each byte."""
    byte, shift = np.arange(256), FIRST_SHIFT[dtype]
    return LEVELS[dtype][np.stack([byte >> shift & 15, byte >> (4 - shift) & 15], axis=1)]


PAIRS = {dtype: _pairs(dtype) for dtype in LEVELS}


def unpacked(stored: np.ndarray, dtype: str) -> np.ndarray:
    """The levels (..., 2 n) in f32 whose codes are `stored` (..., n), two to a byte."""
    return PAIRS[dtype][stored].reshape(*stored.shape[:-1], -1)


def packed(codes: np.ndarray, dtype: str) -> np.ndarray:
    """`codes` (..., 2 n) uint8 below 16, two to a byte."""
    shift = FIRST_SHIFT[dtype]
    return codes[..., ::2] << np.uint8(shift) | codes[..., 1::2] << np.uint8(4 - shift)


def _ranks(x: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """How many of the `bounds` are below each number, uint8: for few bounds faster than a search."""
    found, above = np.zeros(x.shape, np.uint8), np.empty(x.shape, bool)
    for bound in bounds:
        np.greater(x, bound, out=above)
        found += above.view(np.uint8)
    return found


NF4_BOUNDS = (NF4[:-1] + NF4[1:]) / np.float32(2)
# Halfway between two levels the even code is taken: those below an odd one are passed from just under the middle on.
_MIDDLES = (E2M1[:-1] + E2M1[1:]) / np.float32(2)
E2M1_BOUNDS = np.where(np.arange(7) % 2, np.nextafter(_MIDDLES, np.float32(0)), _MIDDLES)


def nf4_codes(x: np.ndarray) -> np.ndarray:
    """Codes of the levels nearest to x in [-1, 1], of two as near the lower."""
    return _ranks(x, NF4_BOUNDS)


def e2m1_codes(x: np.ndarray) -> np.ndarray:
    """Codes of x in [-6, 6] rounded to nearest even in e2m1, with its sign as bit 3."""
    return _ranks(np.abs(x), E2M1_BOUNDS) | np.signbit(x).view(np.uint8) << np.uint8(3)


# what NumPy does not cast to, by dtype: numbers within its limits, divided by their scales, to nearest even
ENCODED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "int8": lambda x: np.rint(x).astype(np.int8),
    "nf4": lambda x: packed(nf4_codes(x), "nf4"),
    "mxfp4": lambda x: packed(e2m1_codes(x), "mxfp4"),
}


def dynamic_map() -> np.ndarray:
    """(256,) f32, sorted: the signed dynamic numbers of 8 bits (Dettmers, "8-bit approximations", 2015; bitsandbytes'
    `create_dynamic_map`)."""
    found = [0.0, 1.0]
    for i in range(7):
        count, first = np.arange(2**i + 1), np.float32(0.1)
        step = (np.float32(1) - first) / np.float32(2**i)
        # from the nearer end, rounded once, as PyTorch's linspace has them
        borders = np.where(count < len(count) // 2, first + count * float(step), 1 - (2**i - count) * float(step))
        borders = borders.astype(np.float32)
        means = np.float32(10.0 ** (i - 6)) * ((borders[:-1] + borders[1:]) / np.float32(2))
        found += [*means, *-means]
    return np.sort(np.array(found, np.float32))


DYNAMIC = dynamic_map()
DYNAMIC_BOUNDS = (DYNAMIC[:-1] + DYNAMIC[1:]) / np.float32(2)


def _dynamic_codes(x: np.ndarray) -> np.ndarray:
    """Codes of x in [-1, 1] as bitsandbytes' CPU build has them: x is taken to one of 65,536 steps, of which it keeps
    the nearest code in a table."""
    half = np.float32(32767.5)
    steps = np.floor((x + np.float32(1)) * half + np.float32(0.5))
    return np.searchsorted(DYNAMIC_BOUNDS, (steps.astype(np.float64) / half - 1).astype(np.float32)).astype(np.uint8)


def mean_of(x: np.ndarray) -> np.float32:
    """The mean of x (n,) in f32, rounded once. Sums are in f64 and in an order that a GPU can keep: every 1024th number
    in turn, then halves of these sums."""
    sums = np.zeros(SUMMED)
    for start in range(0, len(x), SUMMED):
        part = x[start : start + SUMMED]
        sums[: len(part)] += part
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return np.float32(sums[0] / len(x))


def nested(absmax: np.ndarray, offset: float | None = None) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Scales (n,) in 8 bits each: their bytes (n,), f32 scales of every NESTED_BLOCK of them, and the `offset` that is
    taken from them first, by default their mean."""
    mean = np.float32(mean_of(absmax) if offset is None else offset)
    padded = np.zeros(-(-len(absmax) // NESTED_BLOCK) * NESTED_BLOCK, np.float32)
    padded[: len(absmax)] = absmax - mean
    blocks = padded.reshape(-1, NESTED_BLOCK)
    largest = np.abs(blocks).max(axis=1)
    inverse = np.float32(1) / np.where(largest > 0, largest, np.float32(1))
    units = np.where(largest[:, None] > 0, blocks * inverse[:, None], np.float32(-1))
    return _dynamic_codes(units).reshape(-1)[: len(absmax)], largest, mean
