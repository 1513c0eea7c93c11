"""A gain for each column: the formula, and the gradients of finite differences."""

import numpy as np
import pytest

from .build import check_gradient, run


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

    check_gradient(loss, [x, gain], found, 10 * np.abs(d_y).sum())
