"""Magnitudes of adapters: the norm is that of W + s B A, which is not made."""

import numpy as np
import pytest

from .build import run

SCALE = 1.5


@pytest.mark.parametrize("first", [0, 3])
def test_the_gain_is_the_magnitude_over_the_norm_of_the_sum(first):
    rng = np.random.default_rng(first)
    weight, every, b = rng.standard_normal((9, 7)), rng.standard_normal((6, 7)), rng.standard_normal((9, 2))
    m = rng.uniform(1, 2, 9)
    read = (weight, weight @ every.T, every @ every.T, b, m)
    gain, norm = run("output_gain", [(9,), (9,)], *read, dtype="fp64", scale=SCALE, first=first)
    expected = np.linalg.norm(weight + SCALE * b @ every[first : first + 2], axis=1)
    np.testing.assert_allclose(norm, expected, rtol=1e-13)
    np.testing.assert_allclose(gain, m / expected, rtol=1e-13)


def test_rows_without_an_adapter_have_gain_one():
    numbers = {"dtype": "fp64", "scale": 1.0, "first": 0}
    gain, _ = run("output_gain", [(4,), (4,)], None, None, None, None, None, **numbers)
    assert np.array_equal(gain, np.ones(4))
    gain, _ = run("output_gain", [(4,), (4,)], None, None, None, None, np.arange(4.0)[:, None], **numbers)
    assert np.array_equal(gain, np.arange(4.0))
    (found,) = run("output_gain_backward", [(4, 1)], np.arange(4.0), None, dtype="fp64")
    assert np.array_equal(found, np.arange(4.0)[:, None])


def test_the_gradient_of_a_magnitude_is_that_of_its_quotient():
    d_gain, norm, m, step = np.array([3.0, -1.0]), np.array([2.0, 0.5]), np.array([1.0, 4.0]), 1e-6
    (found,) = run("output_gain_backward", [(2,)], d_gain, norm, dtype="fp64")
    slopes = d_gain * ((m + step) / norm - (m - step) / norm) / (2 * step)
    np.testing.assert_allclose(found, slopes, rtol=1e-8)
