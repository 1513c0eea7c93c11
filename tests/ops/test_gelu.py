"""GELUs and squared ReLU where they are next to nothing, and what is not finite; their formulas: test_activation.py."""

import math

import numpy as np
import pytest

from llmq.ops.reference.gelu import gelu, gelu_both, gelu_tanh, gelu_tanh_both, relu2, relu2_both

EVERY = pytest.mark.parametrize(
    ("value", "both"), [(gelu, gelu_both), (gelu_tanh, gelu_tanh_both), (relu2, relu2_both)]
)


def test_no_digits_are_lost_far_below_zero():
    """As they would be in 1 + erf and 1 + tanh, which are 0 there."""
    x = np.array([-6.0, -9.0, -12.0])
    np.testing.assert_allclose(gelu(x), [v * math.erfc(-v / math.sqrt(2)) / 2 for v in x], rtol=1e-13)
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    np.testing.assert_allclose(gelu_tanh(x), x / (1 + np.exp(-2 * u)), rtol=1e-13)


@EVERY
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_nan_stays_and_the_value_beside_the_slope_is_the_value(value, both, dtype):
    x = np.array([[-3, -0.5, 0, 0.5, 3, np.nan]], dtype)
    beside, slope = np.empty_like(x), np.empty_like(x)
    both(beside, slope, x)
    np.testing.assert_array_equal(beside, value(x))
    assert beside.dtype == value(x).dtype == x.dtype
    assert np.isnan(slope).tolist() == np.isnan(beside).tolist() == [[False] * 5 + [True]]
