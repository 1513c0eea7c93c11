"""LayerNorm against plain loops, finite differences and torch."""

import math

import numpy as np
import pytest

from .build import check_gradient, run
from .cases import LARGE, ODD, make

EPS = 1e-2  # large enough that dropping it shows


def forward(res, weight, bias):
    return run("layernorm_forward", [res.shape, *[res.shape[:2]] * 2], res, weight, bias, eps=EPS)


@pytest.mark.parametrize(("size", "with_bias"), [(ODD, True), (ODD, False), (LARGE, True)])
def test_each_token_has_its_mean_subtracted_and_is_divided_by_its_deviation(size, with_bias):
    res, weight, bias = make("layernorm_forward", size).inputs.values()
    bias = bias if with_bias else None
    x, mean, rstd = forward(res, weight, bias)
    for b, t in np.ndindex(size.b, size.t):
        middle = math.fsum(res[b, t]) / size.c
        variance = math.fsum((res[b, t] - middle) ** 2) / size.c
        assert mean[b, t] == pytest.approx(middle, rel=1e-12, abs=1e-15)
        assert rstd[b, t] == pytest.approx((variance + EPS) ** -0.5, rel=1e-13)
        expected = (res[b, t] - middle) / math.sqrt(variance + EPS) * weight
        np.testing.assert_allclose(x[b, t], expected + (bias if with_bias else 0), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("with_residual", [True, False])
def test_gradients_by_finite_differences(with_residual):
    d_x, d_res, res, weight, *_ = make("layernorm_backward", ODD).inputs.values()
    d_res, bias = d_res if with_residual else None, np.linspace(-1, 1, ODD.c)

    def loss(*inputs):
        return np.sum(forward(*inputs)[0] * d_x) + (np.sum(inputs[0] * d_res) if with_residual else 0)

    _, mean, rstd = forward(res, weight, bias)
    shapes = [res.shape, weight.shape, bias.shape]
    gradients = run("layernorm_backward", shapes, d_x, d_res, res, weight, mean, rstd)
    check_gradient(loss, [res, weight, bias], gradients, 10 * np.abs(d_x).sum())


@pytest.mark.judge
def test_torch_agrees():
    torch = pytest.importorskip("torch")
    d_x, d_res, res, weight, *_ = make("layernorm_backward", LARGE).inputs.values()
    bias = np.linspace(-1, 1, LARGE.c)
    r, w, b = (torch.tensor(a, requires_grad=True) for a in (res, weight, bias))
    y = torch.nn.functional.layer_norm(r, (LARGE.c,), w, b, EPS)
    (y * torch.tensor(d_x)).sum().backward()
    x, mean, rstd = forward(res, weight, bias)
    shapes = [res.shape, weight.shape, bias.shape]
    d_out, d_weight, d_bias = run("layernorm_backward", shapes, d_x, d_res, res, weight, mean, rstd)
    np.testing.assert_allclose(x, y.detach(), atol=1e-12)
    np.testing.assert_allclose(d_out, r.grad.numpy() + d_res, atol=1e-12)
    np.testing.assert_allclose(d_weight, w.grad, atol=1e-11)
    np.testing.assert_allclose(d_bias, b.grad, atol=1e-11)
