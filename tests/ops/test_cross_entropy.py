"""Cross-entropy against scalar arithmetic, finite differences with every complication, and torch; the sum of losses."""

import math

import numpy as np
import pytest

from .build import check_gradient, output, run
from .cases import LARGE, ODD, make


def values(case, logits=None, targets=None, dtype="fp64", **numbers):
    logits = case.inputs["logits"] if logits is None else logits
    targets = case.inputs["targets"] if targets is None else targets
    return run("cross_entropy", [*case.outputs.values()], logits, targets, dtype=dtype, **{**case.numbers, **numbers})


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("size", [ODD, LARGE])
def test_loss_and_gradient_of_each_token(size, z_loss):
    case = make("cross_entropy", size)
    logits, targets = case.inputs.values()
    d_logits, loss, hits = values(case, z_loss=z_loss)
    for i in [0, 1, 2, len(targets) - 1]:
        if targets[i] == -100:
            assert loss[i] == hits[i] == 0
            assert (d_logits[i] == 0).all()
            continue
        total = math.fsum(math.exp(x) for x in logits[i, : size.v])
        lse = math.log(total)
        assert loss[i] == pytest.approx(lse - logits[i, targets[i]] + z_loss * lse**2, rel=1e-12)
        expected = np.exp(logits[i, : size.v]) / total * (1 + 2 * z_loss * lse)
        expected[targets[i]] -= 1
        np.testing.assert_allclose(d_logits[i, : size.v], expected, atol=1e-13)
        assert hits[i] == (max(logits[i, : size.v]) == logits[i, targets[i]])


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_gradient_by_finite_differences(z_loss):
    """With ignored targets, and with padded columns, whose derivative is 0."""
    case = make("cross_entropy", ODD)
    assert (case.inputs["targets"] == -100).any()
    assert case.numbers["vocab_size"] < case.inputs["logits"].shape[1]

    def loss(logits):
        return values(case, logits, z_loss=z_loss)[1].sum()

    d_logits, token_losses, _ = values(case, z_loss=z_loss)
    check_gradient(loss, [case.inputs["logits"]], [d_logits], 10 * np.abs(token_losses).sum())


def test_padding_and_ignored_tokens_have_no_influence():
    case = make("cross_entropy", ODD)
    plain = values(case)
    logits, targets = (a.copy() for a in case.inputs.values())
    logits[:, ODD.v :] = np.inf
    logits[targets == -100] = np.nan
    with np.errstate(invalid="ignore"):
        for got, expected in zip(values(case, logits, targets), plain, strict=True):
            np.testing.assert_array_equal(got, expected)
    assert (plain[0][:, ODD.v :] == 0).all()
    assert all(np.isfinite(value).all() for value in values(case, 1e4 * case.inputs["logits"], dtype="fp32"))


@pytest.mark.parametrize("count", [1, 2, 7, 64, 1000])
def test_losses_are_summed_in_a_tree(count):
    """Depth log2(n): the error is at most ceil(log2 n) 2^-24 of the sum; losses are positive."""
    rng = np.random.default_rng(count)
    loss = rng.uniform(0, 9, count).astype(np.float32)
    targets = rng.integers(0, 9, count).astype(np.int32)
    loss_total, num_tokens, _ = run("loss_sum", [(1,)] * 3, loss, targets, None, dtype="fp32")
    exact = math.fsum(loss)
    assert abs(loss_total[0] - exact) <= math.ceil(math.log2(count)) * 2**-24 * exact
    assert num_tokens[0] == count


def test_the_tree_adds_the_second_half_to_the_first():
    """Five losses: ((a+e) + c) + (b + d), with values whose sum shows the order."""
    a, b, c, d, e = (np.float32(x) for x in (1e8, 3.0, -1e8, 2.5e-7, 5.0))
    targets = np.zeros(5, np.int32)
    loss_total = run("loss_sum", [(1,)] * 3, np.array([a, b, c, d, e]), targets, None, dtype="fp32")[0]
    assert loss_total[0] == ((a + e) + c) + (b + d)
    assert loss_total[0] != (((a + b) + c) + d) + e


def test_tokens_are_counted_in_an_integer_cell_and_over_micro_batches():
    num_tokens, num_hits = (output((1,), "int32", start=np.array([7], np.int32)) for _ in range(2))
    total = output((1,), "fp32", start=np.array([1.5], np.float32))
    targets = np.array([[3, -100], [-100, 0]], np.int32)
    hits = np.array([[0, 0], [0, 1]], np.int32)
    run("loss_sum", [total, num_tokens, num_hits], np.array([[1.0, 0], [0, 2.0]]), targets, hits, dtype="fp32")
    assert num_tokens.tensors[0].array[0] == 9 and num_hits.tensors[0].array[0] == 8
    assert total.tensors[0].array[0] == 4.5


def test_a_batch_without_trained_tokens_has_loss_0():
    case = make("cross_entropy", ODD)
    targets = np.full_like(case.inputs["targets"], -100)
    d_logits, loss, hits = values(case, targets=targets)
    assert (d_logits == 0).all()
    assert (loss == 0).all()
    np.testing.assert_array_equal(run("loss_sum", [(1,)] * 3, loss, targets, hits.astype(np.int32)), [[0]] * 3)


def test_of_equal_logits_the_first_is_the_one_that_is_right():
    """Padding counts for nothing, negative zero is zero, and of NaN nothing is right."""
    logits = np.array([[0, 3, 3, 9], [0, 3, 3, 9], [3, 2, 1, 9], [-0.0, 0, -1, 9], [-0.0, 0, -1, 9], [np.nan, 1, 2, 9]])
    targets = np.array([1, 2, -100, 0, 1, 0], np.int32)
    shapes = [logits.shape, targets.shape, targets.shape]
    with np.errstate(invalid="ignore"):
        hits = run("cross_entropy", shapes, logits, targets, dtype="fp32", vocab_size=3, z_loss=0.0)[2]
    np.testing.assert_array_equal(hits, [1, 0, 0, 1, 0, 0])


@pytest.mark.judge
def test_torch_agrees():
    torch = pytest.importorskip("torch")
    case = make("cross_entropy", LARGE)
    x = torch.tensor(case.inputs["logits"], requires_grad=True)
    targets = torch.tensor(case.inputs["targets"]).long()
    real = x[:, : LARGE.v]
    y = torch.nn.functional.cross_entropy(real, targets, ignore_index=-100, reduction="none")
    y = y + 0.02 * torch.logsumexp(real, dim=-1) ** 2 * (targets != -100)
    y.sum().backward()
    d_logits, loss, _ = values(case, z_loss=0.02)
    np.testing.assert_allclose(loss, y.detach(), atol=1e-12)
    np.testing.assert_allclose(d_logits, x.grad, atol=1e-13)
