"""Numbers in 8 bits with a scale for each 128 of a row (`Blocks` in llmq/scaling.py), rounded stochastically.

Optimizer states, and weights without a wider master, are small changes to what they were, which rounding to nearest
would lose: a number between two codes becomes the upper one with the probability that keeps the mean. Codes are e4m3 or
integers; the largest magnitude of a block has the largest code, or where scales are powers of two one near it.

A second moment is held by its root, in codes without a sign: gradients whose magnitudes differ by 255 in a block (by
2^17.8 in e4m3) are distinct, and their squares by as much squared. The upper code is taken with the probability that
keeps the mean of the *square*: with that of the root, each rounding would add its variance to v, 50 times over with
beta_2 = 0.98. A v above 0 never gets the code 0, which would make the next update m / epsilon.
"""

import numpy as np

from llmq.operands import Tensor

E4M3, INT8, UINT8 = (126, 448.0), (127, 127.0), (255, 255.0)  # the largest code of a magnitude, and its value
DROPPED, BIAS = 20, 960  # bits of an f32 that e4m3 lacks; (127 - 7) << 3, between their exponents
NORMAL, NORMAL_CODE = np.float32(2.0**-6), 8  # the smallest normal number of e4m3
UNIT = np.float32(2.0**-16)  # of random bits


def store(target: Tensor, value: np.ndarray, bits: np.ndarray) -> None:
    """target <- value (f32) with its scales, by `bits` (uint16)."""
    units, code = _units(target, np.abs(value)), target.array
    largest, _ = _range(target)
    if _dtype(target) == "e4m3":
        magnitude = np.minimum(_e4m3(units, bits.astype(np.uint32) << 4), largest)
        code.view(np.uint8)[...] = magnitude | np.where(np.signbit(value), 0x80, 0)
    else:
        magnitude = np.minimum(np.floor(units + bits * UNIT), np.float32(largest))
        code[...] = np.copysign(magnitude, value)


def store_root(target: Tensor, value: np.ndarray, bits: np.ndarray) -> None:
    """target <- the root of value (f32, at least 0) with its scales, by `bits` (uint16): its square has the mean of
    value."""
    units = _units(target, np.sqrt(value))
    if _dtype(target) == "e4m3":
        code = _e4m3(units, np.uint32(0))
        below, above = _value(code), _value(code + 1)
    else:
        below = np.floor(units)
        above, code = below + 1, below.astype(np.int32)
    # up with the probability (units^2 - below^2) / (above^2 - below^2)
    is_up = (units - below) * (units + below) > bits * UNIT * ((above - below) * (above + below))
    code = np.minimum(code + is_up, _range(target)[0])
    target.array.view(np.uint8)[...] = np.where(value > 0, np.maximum(code, 1), code)


def _dtype(target: Tensor) -> str:
    assert target.form is not None and target.form.scaling in ("blocks", "powers"), (
        f"{target.name} is not in blocks of 8 bits"
    )
    return target.form.dtype


def _range(target: Tensor) -> tuple[int, float]:
    return E4M3 if _dtype(target) == "e4m3" else INT8 if _dtype(target) == "int8" else UINT8


def _units(target: Tensor, size: np.ndarray) -> np.ndarray:
    """Magnitudes in units of their blocks' scales, which are made."""
    assert target.form is not None and target.scale is not None
    amax = target.form.scales.amax(size.reshape(-1, size.shape[-1]))
    target.scale[...] = target.form.scales.made(amax, _range(target)[1])
    return size * target.form.scales.spread(np.float32(1) / target.scale, size.shape)


def _e4m3(units: np.ndarray, raised: np.ndarray | np.uint32) -> np.ndarray:
    """The code below each magnitude whose bits are `raised`. Small ones are moved up by 2^-6, to where numbers are as
    far apart as subnormal ones."""
    is_small = units < NORMAL
    moved = np.where(is_small, units + NORMAL, units).view(np.uint32)
    return ((moved + raised) >> DROPPED).astype(np.int32) - BIAS - NORMAL_CODE * is_small


def _value(code: np.ndarray) -> np.ndarray:
    """The value of a code of e4m3 without a sign."""
    return (code.astype(np.uint32) << DROPPED).view(np.float32) * np.float32(2.0**120)
