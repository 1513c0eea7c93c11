"""Embedding against plain loops; a gradient whose dense form would not fit is written by rows."""

import numpy as np
import pytest

from llmq.tensor import Form

from .build import check_gradient, output, run, tensor
from .cases import LARGE, ODD, make


@pytest.mark.parametrize("size", [ODD, LARGE])
def test_rows_are_looked_up_and_summed(size):
    case = make("embedding_backward", size)
    d_res, tokens = case.inputs.values()
    weight = np.random.default_rng(0).standard_normal(case.outputs["d_weight"])
    (res,) = run("embedding_forward", [d_res.shape], tokens, weight)
    (d_weight,) = run("embedding_backward", [weight.shape], d_res, tokens)
    expected = np.zeros_like(weight)
    for b in range(size.b):
        for t in range(size.t):
            np.testing.assert_array_equal(res[b, t], weight[tokens[b, t]])
            expected[tokens[b, t]] += d_res[b, t]
    # at most B*T terms, each below 5: both sums are right to B*T 2^-53 of the sum of their magnitudes
    np.testing.assert_allclose(d_weight, expected, atol=2 * (size.b * size.t) ** 2 * 2**-53 * 5, rtol=0)


def test_gradient_by_finite_differences():
    case = make("embedding_backward", ODD)
    d_res, tokens = case.inputs.values()
    weight = np.random.default_rng(0).standard_normal(case.outputs["d_weight"])
    gradient = run("embedding_backward", [weight.shape], d_res, tokens)

    def loss(weight):
        return np.sum(run("embedding_forward", [d_res.shape], tokens, weight)[0] * d_res)

    check_gradient(loss, [weight], gradient, np.abs(d_res).sum() * np.abs(weight).max())


def test_a_table_in_column_form_is_looked_up_dequantised():
    weight = np.random.default_rng(0).standard_normal((16, 6)).astype(np.float32)
    tokens = np.array([[3, 0, 15]], np.int32)
    table = tensor(weight, None, Form("e4m3", "col", "delayed"), scale=0.01)
    (res,) = run("embedding_forward", [(1, 3, 6)], tokens, table, dtype="fp32")
    np.testing.assert_array_equal(res, table.read()[tokens])


def test_accumulating_touches_only_the_rows_that_occur():
    """A large table is not read, added to and written whole: untouched rows may even hold NaN."""
    start = np.full((16, 6), np.nan, np.float32)
    start[3] = 1
    d_weight = output((16, 6), "fp32", start=start)
    run("embedding_backward", [d_weight], np.ones((1, 2, 6)), np.array([[3, 3]], np.int32), dtype="fp32")
    array = d_weight.tensors[0].array
    assert (array[3] == 3).all()
    assert np.isnan(np.delete(array, 3, axis=0)).all()


@pytest.mark.judge
def test_torch_agrees():
    torch = pytest.importorskip("torch")
    case = make("embedding_backward", LARGE)
    d_res, tokens = case.inputs.values()
    weight = torch.randn(case.outputs["d_weight"], dtype=torch.float64, requires_grad=True)
    res = torch.nn.functional.embedding(torch.from_numpy(tokens).long(), weight)
    res.backward(torch.from_numpy(d_res))
    np.testing.assert_array_equal(
        run("embedding_forward", [d_res.shape], tokens, weight.detach().numpy())[0], res.detach()
    )
    np.testing.assert_allclose(run("embedding_backward", [weight.shape], d_res, tokens)[0], weight.grad, atol=1e-12)
