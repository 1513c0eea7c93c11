"""Activations against scalar arithmetic, finite differences and torch: of x alone, and of the gate of SwiGLU's kin."""

import math

import numpy as np
import pytest

from llmq.errors import UsageError
from llmq.ops.cuda.activation import NUMBERS as ACTIVATIONS

from .build import check_gradient, run
from .cases import LARGE, ODD, make

FORMULAS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu2": lambda x: max(x, 0.0) ** 2,
}
EVERY = pytest.mark.parametrize("activation", ACTIVATIONS)


@EVERY
def test_it_is_its_formula(activation):
    x = np.linspace(-4, 4, 33).reshape(1, 3, 11)
    expected = np.vectorize(FORMULAS[activation])(x)
    (act,) = run("activation_forward", [x.shape], x, activation=activation)
    np.testing.assert_allclose(act, expected, rtol=1e-14, atol=1e-15)
    gate_up = np.concatenate([x, 2 * np.ones(x.shape)], axis=-1)
    (act,) = run("swiglu_forward", [x.shape], gate_up, activation=activation)
    np.testing.assert_allclose(act, 2 * expected, rtol=1e-14, atol=1e-15)


@EVERY
@pytest.mark.parametrize("op", ["activation", "swiglu"])
def test_gradient_by_finite_differences(op, activation):
    d_act, x = make(f"{op}_backward", ODD).inputs.values()
    (d_x,) = run(f"{op}_backward", [x.shape], d_act, x, activation=activation)

    def loss(x):
        return np.sum(run(f"{op}_forward", [d_act.shape], x, activation=activation)[0] * d_act)

    check_gradient(loss, [x], [d_x], 10 * np.abs(d_act).sum())


@EVERY
def test_large_numbers_saturate_without_overflow(activation):
    x = np.array([[-500.0, 500.0]])
    with np.errstate(all="raise", under="ignore"):
        (act,) = run("activation_forward", [x.shape], x, dtype="fp32", activation=activation)
        (d,) = run("activation_backward", [x.shape], np.ones(x.shape), x, dtype="fp32", activation=activation)
    np.testing.assert_array_equal(act, [[0, 250_000 if activation == "relu2" else 500]])
    np.testing.assert_array_equal(d, [[0, 1000 if activation == "relu2" else 1]])


def test_another_activation_is_refused():
    with pytest.raises(UsageError, match="the activation mish is not known: use silu, gelu, gelu_tanh or relu2"):
        run("activation_forward", [(1, 2)], np.ones((1, 2)), activation="mish")


@pytest.mark.judge
@EVERY
def test_torch_agrees(activation):
    torch = pytest.importorskip("torch")
    f = torch.nn.functional
    theirs = {
        "silu": f.silu,
        "gelu": f.gelu,
        "gelu_tanh": lambda x: f.gelu(x, approximate="tanh"),
        "relu2": lambda x: f.relu(x) ** 2,
    }[activation]
    for op in ("activation", "swiglu"):
        d_act, given = make(f"{op}_backward", LARGE).inputs.values()
        x = torch.tensor(given, requires_grad=True)
        gate, up = x.chunk(2, dim=-1) if op == "swiglu" else (x, torch.ones(()))
        y = theirs(gate) * up
        (y * torch.tensor(d_act)).sum().backward()
        (act,) = run(f"{op}_forward", [y.shape], given, activation=activation)
        (d_x,) = run(f"{op}_backward", [given.shape], d_act, given, activation=activation)
        np.testing.assert_allclose(act, y.detach(), atol=1e-13)
        np.testing.assert_allclose(d_x, x.grad, atol=1e-13)
