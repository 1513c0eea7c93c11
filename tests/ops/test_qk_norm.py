"""The norm of query and key heads against loops over heads, finite differences and torch."""

import numpy as np
import pytest

from .build import check_gradient, run
from .cases import LARGE, ODD, make

EPS = 1e-2


def norm(x, weight):
    return x / np.sqrt(np.mean(x * x) + EPS) * weight


def forward(case, qkv, q_weight, k_weight, **about):
    numbers = {n: case.numbers[n] for n in ("num_heads", "num_kv_heads")}
    shapes = [qkv.shape, (*qkv.shape[:2], sum(numbers.values()))]
    numbers |= about
    return run("qk_norm_forward", shapes, qkv, q_weight, k_weight, eps=EPS, **numbers)


@pytest.mark.parametrize(("size", "offset"), [(ODD, 0), (LARGE, 0), (ODD, 1)])
def test_query_and_key_heads_are_normed_and_values_copied(size, offset):
    case = make("qk_norm_forward", size)
    qkv, q_weight, k_weight = case.inputs.values()
    out, rstd = forward(case, qkv, q_weight, k_weight, offset=offset)
    for b, t in np.ndindex(size.b, size.t):
        for h in range(size.hq + 2 * size.hkv):
            head = slice(h * size.hd, (h + 1) * size.hd)
            x = qkv[b, t, head]
            if h >= size.hq + size.hkv:
                np.testing.assert_array_equal(out[b, t, head], x)
                continue
            weight = q_weight if h < size.hq else k_weight
            np.testing.assert_allclose(out[b, t, head], norm(x, weight + offset), rtol=1e-12)
            assert rstd[b, t, h] == pytest.approx((np.mean(x * x) + EPS) ** -0.5, rel=1e-12)


@pytest.mark.parametrize("offset", [0, 1])
def test_gradients_by_finite_differences(offset):
    case = make("qk_norm_backward", ODD)
    case.numbers["offset"] = offset
    d_out, qkv, q_weight, k_weight, _ = case.inputs.values()

    def loss(*inputs):
        return np.sum(forward(case, *inputs, offset=offset)[0] * d_out)

    rstd = forward(case, qkv, q_weight, k_weight)[1]
    gradients = run("qk_norm_backward", [*case.outputs.values()], d_out, qkv, q_weight, k_weight, rstd, **case.numbers)
    check_gradient(loss, [qkv, q_weight, k_weight], gradients, 10 * np.abs(d_out).sum())


@pytest.mark.judge
def test_torch_agrees():
    torch = pytest.importorskip("torch")
    case = make("qk_norm_backward", LARGE)
    s = LARGE
    d_out, qkv, q_weight, k_weight, _ = case.inputs.values()
    x, qw, kw = (torch.tensor(a, requires_grad=True) for a in (qkv, q_weight, k_weight))
    q, k, v = x.reshape(s.b, s.t, -1, s.hd).split([s.hq, s.hkv, s.hkv], dim=2)
    rms_norm = torch.nn.functional.rms_norm
    y = torch.cat([rms_norm(q, (s.hd,), qw, EPS), rms_norm(k, (s.hd,), kw, EPS), v], dim=2).reshape(qkv.shape)
    (y * torch.tensor(d_out)).sum().backward()
    out, rstd = forward(case, qkv, q_weight, k_weight)
    np.testing.assert_allclose(out, y.detach(), atol=1e-12)
    gradients = run("qk_norm_backward", [*case.outputs.values()], d_out, qkv, q_weight, k_weight, rstd, **case.numbers)
    for gradient, expected in zip(gradients, (x, qw, kw), strict=True):
        np.testing.assert_allclose(gradient, expected.grad, atol=1e-10)
