"""The linear map against einsum, finite differences for every input, weights in column form, and torch."""

import numpy as np
import pytest

from llmq.operands import Output, Tensor
from llmq.tensor import COLSUM, Form

from .build import check_gradient, run, tensor
from .cases import LARGE, ODD, OWN_SCALES, make

OPTIONAL = pytest.mark.parametrize("absent", [(), ("bias",), ("residual",), ("bias", "residual")], ids=str)


def forward(case, *inputs):
    return run("linear_forward", [*case.outputs.values()], *inputs)[0]


@OPTIONAL
@pytest.mark.parametrize("size", [ODD, LARGE])
def test_forward(size, absent):
    case = make("linear_forward", size)
    case.inputs |= dict.fromkeys(absent)
    x, weight, bias, residual = case.inputs.values()
    expected = np.einsum("btk,nk->btn", x, weight)
    expected = expected + (0 if bias is None else bias) + (0 if residual is None else residual)
    np.testing.assert_allclose(case.values("fp64")["y"], expected, atol=1e-11)


@OPTIONAL
def test_gradients_by_finite_differences(absent):
    case = make("linear_forward", ODD)
    x, weight, bias, _ = case.inputs.values()
    d_y = np.random.default_rng(3).standard_normal(case.outputs["y"])
    gradients = {
        "x": run("linear_dgrad", [x.shape], d_y, weight, None)[0],
        "weight": run("linear_wgrad", [weight.shape], d_y, x)[0],
        "bias": run("bias_backward", [bias.shape], tensor(d_y, None, Form("fp64", "colsum")))[0],
        "residual": d_y,
    }
    given = [n for n in case.inputs if n not in absent]

    def loss(*inputs):
        arguments = dict(zip(given, inputs, strict=True))
        return np.sum(forward(case, *(arguments.get(n) for n in case.inputs)) * d_y)

    size = np.abs(d_y).sum() * 100
    check_gradient(loss, [case.inputs[n] for n in given], [gradients[n] for n in given], size)


def test_the_bias_sums_all_column_sums():
    """600 rows in partial sums of 256: three, the last one short."""
    d_y = np.random.default_rng(0).integers(-9, 9, (3, 200, 5)).astype(np.float64)
    read = tensor(d_y, None, COLSUM)
    assert read.array.shape == (3, 5)
    np.testing.assert_array_equal(run("bias_backward", [(5,)], read)[0], d_y.sum(axis=(0, 1)))


@pytest.mark.parametrize("scaling", ["delayed", *OWN_SCALES])
@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("op", ["linear_forward", "linear_dgrad", "linear_wgrad"])
def test_quantized_arguments_are_read_dequantised(op, layout, scaling):
    """The product of the stored values, in f32: exactly that of the same values given plain."""
    case = make(op, LARGE)
    names = [n for n in case.inputs if n not in ("bias", "residual")]
    quantized = {n: tensor(case.inputs[n], None, Form("e4m3", layout, scaling), 0.01) for n in names}
    got = case.values("fp32", **quantized)
    case.inputs |= {n: x.read().astype(np.float64) for n, x in quantized.items()}
    for name, expected in case.values("fp32").items():
        # BLAS may add in another order for a transposed operand: K terms, each side right to K 2^-24 of their size
        bound = 2 * 2**-24 * max(LARGE.c, LARGE.f, LARGE.b * LARGE.t) * np.abs(expected).max()
        np.testing.assert_allclose(got[name], expected, atol=bound, rtol=0)


@pytest.mark.parametrize("op", ["linear_forward", "linear_dgrad", "linear_wgrad"])
def test_alpha_scales_the_product_and_nothing_else(op):
    case = make(op, LARGE)
    (name, usual), product = *case.values("fp64").items(), make(op, LARGE)
    product.inputs |= {other: None for other in ("bias", "residual") if other in product.inputs}
    case.numbers = {"alpha": -0.375}
    expected = usual - 1.375 * product.values("fp64")[name]
    np.testing.assert_allclose(case.values("fp64")[name], expected, atol=1e-10)
    start = np.ones(case.outputs[name])
    added = case.values("fp64", **{name: case.output(name, "fp64", start=start)})[name]
    np.testing.assert_allclose(added, expected + 1, atol=1e-10)
    case.numbers = {"alpha": 1.0}
    assert case.values("bf16")[name].tobytes() == make(op, LARGE).values("bf16")[name].tobytes()


def test_the_residual_of_a_gradient_is_added():
    case = make("linear_dgrad", ODD)
    expected = np.einsum("btn,nk->btk", case.inputs["d_y"], case.inputs["weight"]) + case.inputs["residual"]
    np.testing.assert_allclose(case.values("fp64")["d_x"], expected, atol=1e-11)


def columns(x, start, width):
    """A tensor that is columns of a matrix `width` wide, from `start` on; the others are NaN."""
    rows = np.full((int(np.prod(x.shape[:-1])), width), np.nan, x.array.dtype)
    rows[:, start : start + x.shape[-1]] = x.array.reshape(len(rows), -1)
    view = rows[:, start : start + x.shape[-1]]
    return Tensor(x.name, view, view.shape), rows


@pytest.mark.parametrize("op", ["linear_forward", "linear_dgrad", "linear_wgrad"])
def test_operands_and_results_may_be_columns_of_a_wider_matrix(op):
    case = make(op, LARGE)
    ((name, apart),) = case.values("fp32").items()
    given = {n: columns(case.input(n, "fp32"), 8, 2048)[0] for n in case.inputs if n not in ("bias", "weight")}
    (target,) = case.output(name, "fp32").tensors
    view, rows = columns(target, 16, 2048)
    case.call("fp32", **given, **{name: Output(name, view.shape, "fp32", (view,))})
    # BLAS may add in another order for other strides: K terms, each side right to K 2^-24 of their size
    bound = 2 * 2**-24 * max(LARGE.c, LARGE.f, LARGE.b * LARGE.t) * np.abs(apart).max()
    np.testing.assert_allclose(view.array, apart.reshape(view.shape), atol=bound, rtol=0)
    assert np.isnan(rows[:, :16]).all() and np.isnan(rows[:, 16 + view.shape[1] :]).all()


@pytest.mark.judge
def test_torch_agrees():
    torch = pytest.importorskip("torch")
    case = make("linear_forward", LARGE)
    x, weight, bias, residual = (torch.tensor(a, requires_grad=True) for a in case.inputs.values())
    y = torch.nn.functional.linear(x, weight, bias) + residual
    d_y = np.random.default_rng(3).standard_normal(y.shape)
    (y * torch.tensor(d_y)).sum().backward()
    np.testing.assert_allclose(case.values("fp64")["y"], y.detach(), atol=1e-11)
    arrays = case.inputs
    np.testing.assert_allclose(run("linear_dgrad", [x.shape], d_y, arrays["weight"], None)[0], x.grad, atol=1e-11)
    np.testing.assert_allclose(run("linear_wgrad", [weight.shape], d_y, arrays["x"])[0], weight.grad, atol=1e-11)
    np.testing.assert_allclose(run("bias_backward", [bias.shape], d_y)[0], bias.grad, atol=1e-11)
