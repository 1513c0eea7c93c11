"""SwiGLU against scalar arithmetic, finite differences and torch."""

import math

import numpy as np
import pytest

from .build import check_gradient, run
from .cases import LARGE, ODD, make


@pytest.mark.parametrize("size", [ODD, LARGE])
def test_gate_comes_first(size):
    case = make("swiglu_forward", size)
    gate_up = case.inputs["gate_up"]
    act = case.values("fp64")["act"]
    for b, t, f in [(0, 0, 0), (size.b - 1, size.t - 1, size.f - 1), (1, 3, 2)]:
        gate, up = gate_up[b, t, f], gate_up[b, t, size.f + f]
        assert act[b, t, f] == pytest.approx(gate / (1 + math.exp(-gate)) * up, rel=1e-14)


def test_gradient_by_finite_differences():
    case = make("swiglu_backward", ODD)
    d_act, gate_up = case.inputs.values()

    def loss(gate_up):
        return np.sum(run("swiglu_forward", [d_act.shape], gate_up)[0] * d_act)

    check_gradient(loss, [gate_up], [case.values("fp64")["d_gate_up"]], 10 * np.abs(d_act).sum())


def test_large_gates_saturate_without_overflow():
    gate_up = np.array([[[-500.0, 500.0, 2.0, 3.0]]])
    with np.errstate(all="raise", under="ignore"):
        (act,) = run("swiglu_forward", [(1, 1, 2)], gate_up, dtype="fp32")
        (d,) = run("swiglu_backward", [(1, 1, 4)], np.ones((1, 1, 2)), gate_up, dtype="fp32")
    np.testing.assert_array_equal(act, [[[0, 1500]]])
    np.testing.assert_array_equal(d, [[[0, 3, 0, 500]]])


@pytest.mark.judge
def test_torch_agrees():
    torch = pytest.importorskip("torch")
    d_act, gate_up = make("swiglu_backward", LARGE).inputs.values()
    x = torch.tensor(gate_up, requires_grad=True)
    gate, up = x.chunk(2, dim=-1)
    y = torch.nn.functional.silu(gate) * up
    (y * torch.tensor(d_act)).sum().backward()
    np.testing.assert_allclose(run("swiglu_forward", [y.shape], gate_up)[0], y.detach(), atol=1e-13)
    np.testing.assert_allclose(run("swiglu_backward", [x.shape], d_act, gate_up)[0], x.grad, atol=1e-13)
