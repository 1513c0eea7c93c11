"""Dropout: each element a function of its address, the asked share left out, the mean kept."""

import numpy as np
import pytest

from llmq.ops.reference.dropout import dropped_steps
from llmq.ops.reference.random import DROPOUT, philox4x32

from .build import run

RATE, SEED, STREAM = 0.25, 0x1234567_89ABCDEF, 0xF1234567


def dropped(x, samples, residual=None, dtype="fp64", **numbers):
    """The result for x (tokens, K), of rows of 16 tokens."""
    numbers = {"rate": RATE, "seed": SEED, "stream": STREAM, "first": 0, "length": 16, **numbers}
    places = np.asarray(samples, np.int32)
    return run("dropout", [x.shape], x, places, residual, dtype=dtype, **numbers)[0]


@pytest.mark.parametrize("width", [8, 6])
def test_an_element_goes_by_16_bits_of_the_block_at_its_address(width):
    samples = np.array([7, -2])
    found = dropped(np.ones((32, width)), samples)
    for sample, token, k in [(0, 0, 0), (0, 3, 5), (1, 0, 1), (1, 15, width - 1)]:
        element, place = token * width + k, int(samples[sample]) % 2**32
        counter = np.array([[element // 8], [0], [place], [DROPOUT]], np.uint32)
        words = philox4x32(counter, (0x89ABCDEF, 0x1234567 ^ STREAM))[:, 0]
        bits = int(words[element % 4]) >> (16 if element % 8 >= 4 else 0) & 0xFFFF
        assert found[sample * 16 + token, k] == pytest.approx(0 if bits < RATE * 2**16 else 4 / 3, rel=1e-7)


def test_a_piece_has_the_mask_of_the_whole():
    whole = dropped(np.ones((48, 10)), [3, 900, 4])
    for first, count in ((0, 5), (7, 20), (16, 16), (30, 18)):
        assert np.array_equal(dropped(np.ones((count, 10)), [3, 900, 4], first=first), whole[first : first + count])
    assert np.array_equal(dropped(np.ones((16, 10)), [900]), whole[16:32])
    for other in ({"seed": 1}, {"stream": 1}):
        assert (dropped(np.ones((48, 10)), [3, 900, 4], **other) != whole).mean() > 0.2


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5, 0.9])
def test_the_share_and_the_mean_are_those_asked_for(rate):
    """Of n draws the share is within 5 sqrt(p (1 - p) / n), and what is kept grows by the reciprocal of its share."""
    found = dropped(np.ones((512, 128)), np.arange(32), rate=rate)
    share, n = dropped_steps(rate) / 2**16, found.size
    assert abs(share - rate) <= 2.0**-17
    assert abs((found == 0).mean() - share) <= 5 * np.sqrt(share * (1 - share) / n)
    np.testing.assert_allclose(found[found != 0], 1 / (1 - share), rtol=1e-7)


def test_a_residual_is_added_and_the_sum_rounded_once():
    x, residual = np.random.default_rng(0).standard_normal((2, 32, 8)).astype(np.float32)
    mask = dropped(np.ones_like(x), [1, 2]) != 0
    expected = np.where(mask, x * np.float32(4 / 3), np.float32(0)) + residual
    assert np.array_equal(dropped(x, [1, 2], residual, "fp32"), expected)
