"""The norm that is added to the stream against the norm, and its gradient by finite differences."""

import numpy as np
import pytest

from .build import check_gradient, run
from .cases import LARGE, ODD, make

EPS = 1e-2


@pytest.mark.parametrize("offset", [0, 1])
def test_what_is_added_to_the_stream_is_the_norm(offset):
    case = make("post_norm_forward", LARGE)
    x, weight, residual = case.inputs.values()
    out, rstd = run("post_norm_forward", [x.shape, x.shape[:2]], x, weight, residual, eps=EPS, offset=offset)
    norm, right = run("rmsnorm_forward", [x.shape, x.shape[:2]], x, weight, eps=EPS, offset=offset)
    np.testing.assert_allclose(out, residual + norm, rtol=1e-15, atol=1e-15)
    np.testing.assert_array_equal(rstd, right)


def test_the_gradient_of_a_norm_that_is_added_is_that_of_the_norm():
    x, weight, residual = make("post_norm_forward", ODD).inputs.values()
    d_out = make("rmsnorm_backward", ODD).inputs["d_x"]
    numbers, shapes = {"eps": EPS, "offset": 1}, [x.shape, x.shape[:2]]

    def loss(x, weight):
        return np.sum(run("post_norm_forward", shapes, x, weight, residual, **numbers)[0] * d_out)

    rstd = run("post_norm_forward", shapes, x, weight, residual, **numbers)[1]
    gradients = run("rmsnorm_backward", [x.shape, weight.shape], d_out, None, x, weight, rstd, offset=1)
    check_gradient(loss, [x, weight], gradients, 10 * np.abs(d_out).sum())
