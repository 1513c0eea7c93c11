"""Multiples and soft-caps against their formulas, finite differences and torch."""

import math

import numpy as np
import pytest

from llmq.errors import UsageError
from llmq.ops import cuda

from .build import arguments_of, check_gradient, output, run, tensor
from .cases import ODD, make


def test_a_multiple_is_added_to_the_residual():
    x, residual = make("scale", ODD).inputs.values()
    np.testing.assert_array_equal(run("scale", [x.shape], x, residual, factor=0.3)[0], x * 0.3 + residual)
    np.testing.assert_array_equal(run("scale", [x.shape], x, None, factor=0.3)[0], x * 0.3)


@pytest.mark.parametrize("cap", [math.inf, 2.0])
def test_the_gradient_by_finite_differences(cap):
    d_y, x = make("softcap_backward", ODD).inputs.values()
    numbers = {"cap": cap, "factor": 1.5}
    x = 2 * x
    (y,) = run("softcap_forward", [x.shape], x, **numbers)
    (d_x,) = run("softcap_backward", [x.shape], d_y, y, **numbers)

    def loss(x):
        return np.sum(run("softcap_forward", [x.shape], x, **numbers)[0] * d_y)

    check_gradient(loss, [x], [d_x], 10 * np.abs(d_y).sum())
    assert np.abs(y).max() < cap


@pytest.mark.parametrize("cap", [0.0, -30.0])
def test_what_is_no_cap_is_refused(cap):
    x = tensor(np.ones((2, 8)), "bf16")
    call = arguments_of("softcap_forward", output(x.shape, "bf16"), x, cap=cap)
    with pytest.raises(UsageError, match=f"a soft-cap of {cap:g} caps nothing: use a positive number, or none"):
        cuda.KERNELS["softcap_forward"].needed(call)


def test_large_values_saturate():
    x = np.array([[-1e30, 1e30, 0.5]])
    np.testing.assert_allclose(run("softcap_forward", [x.shape], x, cap=30.0)[0][0, :2], [-30, 30])


@pytest.mark.judge
def test_torch_agrees():
    torch = pytest.importorskip("torch")
    d_y, values = make("softcap_backward", ODD).inputs.values()
    x = torch.tensor(values, requires_grad=True)
    y = 30.0 * torch.tanh(x / 4.0 / 30.0)
    (y * torch.tensor(d_y)).sum().backward()
    (found,) = run("softcap_forward", [x.shape], values, cap=30.0, factor=0.25)
    np.testing.assert_allclose(found, y.detach(), atol=1e-13)
    np.testing.assert_allclose(
        run("softcap_backward", [x.shape], d_y, found, cap=30.0, factor=0.25)[0], x.grad, atol=1e-13
    )
