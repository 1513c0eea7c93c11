"""RMSNorm against plain loops, finite differences and torch."""

import math

import numpy as np
import pytest

from .build import check_gradient, run
from .cases import LARGE, ODD, make

EPS = 1e-2  # large enough that dropping it shows


@pytest.mark.parametrize(("size", "offset"), [(ODD, 0), (LARGE, 0), (ODD, 1)])
def test_each_token_is_divided_by_its_root_mean_square(size, offset):
    res, weight = make("rmsnorm_forward", size).inputs.values()
    x, rstd = run("rmsnorm_forward", [res.shape, res.shape[:2]], res, weight, eps=EPS, offset=offset)
    for b in range(size.b):
        for t in range(size.t):
            mean = math.fsum(res[b, t] ** 2) / size.c
            assert rstd[b, t] == pytest.approx((mean + EPS) ** -0.5, rel=1e-13)
            np.testing.assert_allclose(x[b, t], res[b, t] / math.sqrt(mean + EPS) * (weight + offset), rtol=1e-13)


@pytest.mark.parametrize(("with_residual", "offset"), [(True, 0), (False, 0), (True, 1)])
def test_gradients_by_finite_differences(with_residual, offset):
    case = make("rmsnorm_backward", ODD)
    d_x, d_res, res, weight, _ = case.inputs.values()
    d_res = d_res if with_residual else None

    def forward(res, weight):
        return run("rmsnorm_forward", [res.shape, res.shape[:2]], res, weight, eps=EPS, offset=offset)

    def loss(res, weight):
        return np.sum(forward(res, weight)[0] * d_x) + (np.sum(res * d_res) if with_residual else 0)

    rstd = forward(res, weight)[1]
    read = (d_x, d_res, res, weight, rstd)
    gradients = run("rmsnorm_backward", [res.shape, weight.shape], *read, offset=offset)
    check_gradient(loss, [res, weight], gradients, 10 * np.abs(d_x).sum())


@pytest.mark.judge
def test_torch_agrees():
    torch = pytest.importorskip("torch")
    d_x, d_res, res, weight, _ = make("rmsnorm_backward", LARGE).inputs.values()
    r, w = (torch.tensor(a, requires_grad=True) for a in (res, weight))
    y = torch.nn.functional.rms_norm(r, (LARGE.c,), w, EPS)
    (y * torch.tensor(d_x)).sum().backward()
    x, rstd = run("rmsnorm_forward", [res.shape, res.shape[:2]], res, weight, eps=EPS)
    d_out, d_weight = run("rmsnorm_backward", [res.shape, weight.shape], d_x, d_res, res, weight, rstd)
    np.testing.assert_allclose(x, y.detach(), atol=1e-12)
    np.testing.assert_allclose(d_out, r.grad.numpy() + d_res, atol=1e-12)
    np.testing.assert_allclose(d_weight, w.grad, atol=1e-11)
