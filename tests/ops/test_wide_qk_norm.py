"""The norm of all query heads and of all key heads against loops over tokens, finite differences and torch."""

import numpy as np
import pytest

from .build import check_gradient, run
from .cases import LARGE, ODD, make

EPS = 1e-2


def forward(case, qkv, q_weight, k_weight):
    numbers = {n: case.numbers[n] for n in ("num_heads", "num_kv_heads")}
    shapes = [qkv.shape, (*qkv.shape[:2], 2)]
    return run("wide_qk_norm_forward", shapes, qkv, q_weight, k_weight, eps=EPS, **numbers)


@pytest.mark.parametrize("size", [ODD, LARGE])
def test_queries_and_keys_are_normed_and_values_copied(size):
    case = make("wide_qk_norm_forward", size)
    qkv, *weights = case.inputs.values()
    out, rstd = forward(case, qkv, *weights)
    cuts = [size.hq * size.hd, (size.hq + size.hkv) * size.hd]
    (*normed, values), (*given, copied) = (np.split(x, cuts, axis=-1) for x in (out, qkv))
    np.testing.assert_array_equal(values, copied)
    for i, (x, found, weight) in enumerate(zip(given, normed, weights, strict=True)):
        for b, t in np.ndindex(size.b, size.t):
            root = np.sqrt(np.mean(x[b, t] ** 2) + EPS)
            np.testing.assert_allclose(found[b, t], x[b, t] / root * weight, rtol=1e-12)
            assert rstd[b, t, i] == pytest.approx(1 / root, rel=1e-12)


def test_gradients_by_finite_differences():
    case = make("wide_qk_norm_backward", ODD)
    d_out, qkv, q_weight, k_weight, _ = case.inputs.values()

    def loss(*inputs):
        return np.sum(forward(case, *inputs)[0] * d_out)

    read = (d_out, qkv, q_weight, k_weight, forward(case, qkv, q_weight, k_weight)[1])
    gradients = run("wide_qk_norm_backward", [*case.outputs.values()], *read, **case.numbers)
    check_gradient(loss, [qkv, q_weight, k_weight], gradients, 10 * np.abs(d_out).sum())


@pytest.mark.judge
def test_torch_agrees():
    torch = pytest.importorskip("torch")
    case, s = make("wide_qk_norm_backward", LARGE), LARGE
    d_out, qkv, q_weight, k_weight, _ = case.inputs.values()
    x, qw, kw = (torch.tensor(a, requires_grad=True) for a in (qkv, q_weight, k_weight))
    q, k, v = x.split([s.hq * s.hd, s.hkv * s.hd, s.hkv * s.hd], dim=-1)
    rms_norm = torch.nn.functional.rms_norm
    y = torch.cat([rms_norm(q, q.shape[-1:], qw, EPS), rms_norm(k, k.shape[-1:], kw, EPS), v], dim=-1)
    (y * torch.tensor(d_out)).sum().backward()
    out, rstd = forward(case, qkv, q_weight, k_weight)
    np.testing.assert_allclose(out, y.detach(), atol=1e-12)
    read = (d_out, qkv, q_weight, k_weight, rstd)
    gradients = run("wide_qk_norm_backward", [*case.outputs.values()], *read, **case.numbers)
    for gradient, expected in zip(gradients, (x, qw, kw), strict=True):
        np.testing.assert_allclose(gradient, expected.grad, atol=1e-10)
