"""Codes of 8 bits keep the mean of a number, or of the square of a root, and no root above 0 becomes 0."""

import numpy as np
import pytest

from llmq.operands import Tensor
from llmq.ops.reference.eight_bits import store, store_root
from llmq.ops.reference.random import random_words
from llmq.scaling import BLOCK
from llmq.tensor import DTYPES, Form

SHAPE, COUNT = (4, 300), 2000
LEAST = {"e4m3": 2.0**-9, "int8": 1.0, "uint8": 1.0}  # steps from 0, in units of a scale


def target(dtype):
    """Poisoned codes and scales."""
    form, count = Form(dtype, "row", "blocks"), -(-SHAPE[1] // BLOCK)
    codes = np.full(SHAPE, 0x7F, np.uint8).view(DTYPES[dtype])
    return Tensor("t", codes, SHAPE, form, np.full((SHAPE[0], count), np.nan, np.float32))


def mean(put, dtype, value, read):
    """The mean of what is read back over COUNT sets of random bits, and the scales number by number."""
    found = np.zeros(SHAPE)
    for step in range(COUNT):
        words = random_words(1, step, 0, 0, 0, value.size // 4)
        held = target(dtype)
        put(held, value, words.T.ravel().astype(np.uint16).reshape(SHAPE))
        found += read(held.read().astype(np.float64))
    return found / COUNT, np.repeat(held.scale, BLOCK, axis=1)[:, : SHAPE[1]]


def magnitudes(lowest):
    """Over many orders of magnitude, with zeros."""
    rng = np.random.default_rng(0)
    value = 10.0 ** rng.uniform(lowest, 1, SHAPE)
    value[0, ::7] = 0
    return value.astype(np.float32), rng.choice([-1, 1], SHAPE).astype(np.float32)


@pytest.mark.parametrize("dtype", ["e4m3", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_number_keeps_its_mean(dtype):
    """A number lies between codes that are at most an eighth of it apart, or the least step; a deviation of the mean is
    at most half of that by the root of COUNT, and 6 of them are never seen."""
    value, sign = magnitudes(-3)
    found, scale = mean(store, dtype, value * sign, lambda read: read)
    gap = np.maximum(value / 8 if dtype == "e4m3" else 0, scale * LEAST[dtype])
    assert np.all(np.abs(found - value * sign) <= 6 * gap / 2 / np.sqrt(COUNT))
    assert np.all(found[value == 0] == 0)


@pytest.mark.parametrize("dtype", [pytest.param("e4m3", marks=pytest.mark.slow), "uint8"])
def test_a_root_keeps_the_mean_of_its_square_and_is_never_zero(dtype):
    """Above the least step; a square below that is raised to it."""
    value, _ = magnitudes(-12)
    found, scale = mean(store_root, dtype, value, np.square)
    least = (scale.astype(np.float64) * LEAST[dtype]) ** 2
    root, low = np.sqrt(value.astype(np.float64)), np.sqrt(least)
    gap = np.maximum(root / 8 if dtype == "e4m3" else 0, low)  # between codes
    bound = 6 * (2 * root * gap + gap**2) / 2 / np.sqrt(COUNT) + 1e-6 * value
    normal = value >= least
    assert normal.any() and not normal.all()
    assert np.all(np.abs(found - value)[normal] <= bound[normal])
    raised = ~normal & (value > 0)
    np.testing.assert_allclose(found[raised], least[raised], rtol=1e-6)
    assert np.all(found[value == 0] == 0)
