"""Dropout and noise on embeddings: each element a function of its address, of the asked size."""

import numpy as np
import pytest

from llmq.ops.reference.noise import dropped_steps
from llmq.ops.reference.random import DROPOUT, EMBEDDING, philox4x32

from .build import run
from .cases import LARGE, ODD, make

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


ALPHA = 5.0


def noise_of(samples, shape, dtype="fp64", **numbers):
    """The noise on zeros."""
    numbers = {"alpha": ALPHA, "seed": SEED, "stream": STREAM, **numbers}
    return run("embedding_noise", [shape], np.zeros(shape), np.asarray(samples, np.int32), dtype=dtype, **numbers)[0]


@pytest.mark.parametrize("size", [ODD, LARGE])
def test_an_element_is_a_word_of_the_block_at_its_address(size):
    samples = np.array([7, -2, 2**31 - 1][: size.b])
    found = noise_of(samples, (size.b, size.t, size.c))
    scale = np.float64(np.float32(ALPHA / np.sqrt(size.t * size.c)))
    for b, t, c in [(0, 0, 0), (0, 0, 5), (1, 3, 2), (size.b - 1, size.t - 1, size.c - 1)]:
        element, place = t * size.c + c, int(samples[b]) % 2**32
        counter = np.array([[element // 4], [0], [place], [EMBEDDING]], np.uint32)
        words = philox4x32(counter, (0x89ABCDEF, 0x1234567 ^ STREAM))[:, 0]
        assert found[b, t, c] == ((int(words[element % 4]) >> 8) / 2**23 - 1) * scale


def test_it_is_added_and_rounded_once_to_the_stored_dtype():
    case = make("embedding_noise", LARGE)
    for dtype in ("fp32", "bf16"):
        res = case.input("res", dtype)
        scale = np.float32(ALPHA / np.sqrt(LARGE.t * LARGE.c))
        wide = noise_of(case.inputs["samples"], res.shape, "fp64", seed=3 + 2**40) / np.float64(scale)
        u = (np.round(wide * 2**23) / 2**23).astype(np.float32)
        expected = (res.read() + u * scale).astype(res.array.dtype)
        np.testing.assert_array_equal(case.values(dtype)["out"], expected)


def test_it_is_uniform_and_as_large_as_asked():
    """Of n draws in [-1, 1): mean within 5 / sqrt(3 n), mean square 1/3 within 5 sqrt(4/45) / sqrt(n)."""
    b, t, c = 8, 64, 256
    u = noise_of(np.arange(b), (b, t, c)) / (ALPHA / np.sqrt(t * c))
    n = u.size
    assert -1 <= u.min() < -0.9999 and 0.9999 < u.max() < 1
    assert abs(u.mean()) < 5 / np.sqrt(3 * n) and abs((u * u).mean() - 1 / 3) < 5 * np.sqrt(4 / 45 / n)
    # neighbours along every axis are independent: a product of two has the mean square 1/9
    for axis in range(3):
        product = np.take(u, range(1, u.shape[axis]), axis) * np.take(u, range(u.shape[axis] - 1), axis)
        assert abs(product.mean()) < 5 / 3 / np.sqrt(product.size)


def test_a_sample_has_its_noise_wherever_it_is():
    whole = noise_of([3, 900, 4], (3, 5, 8))
    for row, place in enumerate([3, 900, 4]):
        np.testing.assert_array_equal(noise_of([place], (1, 5, 8))[0], whole[row])
    base = noise_of([3], (1, 5, 8))
    for other in (noise_of([4], (1, 5, 8)), noise_of([3], (1, 5, 8), seed=1), noise_of([3], (1, 5, 8), stream=1)):
        assert (other != base).mean() > 0.9
    np.testing.assert_allclose(noise_of([3], (1, 5, 8), alpha=10.0), 2 * base, rtol=1e-7)
