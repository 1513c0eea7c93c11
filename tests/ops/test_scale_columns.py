"""A gain for each column: the formula, and the gradients of finite differences."""

import numpy as np
import pytest

from .build import run


def drawn(seed=0, shape=(3, 5, 4)):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape), rng.uniform(0.5, 2, shape[-1]), rng.standard_normal(shape)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_bias_and_residual_are_added_after_the_gain(has_bias, has_residual):
    x, gain, residual = drawn()
    bias = np.arange(4.0) if has_bias else None
    (y,) = run("scale_columns_forward", [x.shape], x, gain, bias, residual if has_residual else None, dtype="fp64")
    expected = x * gain + (bias if has_bias else 0) + (residual if has_residual else 0)
    np.testing.assert_allclose(y, expected, rtol=1e-15)


def test_gradients_are_those_of_finite_differences():
    x, gain, d_y = drawn()
    found = run("scale_columns_backward", [x.shape, gain.shape], d_y, x, gain, dtype="fp64")

    def loss(x, gain):
        return np.sum(run("scale_columns_forward", [x.shape], x, gain, None, None, dtype="fp64")[0] * d_y)

    rng, step = np.random.default_rng(1), 1e-6
    to_x, to_gain = rng.standard_normal(x.shape), rng.standard_normal(gain.shape)
    for gradient, direction, changed in (
        (found[0], to_x, lambda h: loss(x + h * to_x, gain)),
        (found[1], to_gain, lambda h: loss(x, gain + h * to_gain)),
    ):
        slope = (changed(step) - changed(-step)) / (2 * step)
        assert slope == pytest.approx(float(np.sum(gradient * direction)), rel=1e-8)
