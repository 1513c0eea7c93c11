"""Noise on embeddings: each element a function of its address, of the asked size, and uniform."""

import numpy as np
import pytest

from llmq.ops.reference.random import EMBEDDING, philox4x32

from .build import run
from .cases import LARGE, ODD, make

ALPHA, SEED, STREAM = 5.0, 0x1234567_89ABCDEF, 0xF1234567


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


def test_a_sample_has_its_noise_wherever_it_stands():
    whole = noise_of([3, 900, 4], (3, 5, 8))
    for row, place in enumerate([3, 900, 4]):
        np.testing.assert_array_equal(noise_of([place], (1, 5, 8))[0], whole[row])
    base = noise_of([3], (1, 5, 8))
    for other in (noise_of([4], (1, 5, 8)), noise_of([3], (1, 5, 8), seed=1), noise_of([3], (1, 5, 8), stream=1)):
        assert (other != base).mean() > 0.9
    np.testing.assert_allclose(noise_of([3], (1, 5, 8), alpha=10.0), 2 * base, rtol=1e-7)
