"""What adapters compute: formulas by hand, and the gradients of finite differences."""

import numpy as np
import pytest

from llmq.ops.seam import Arguments, record
from llmq.tensor import Ref

from .build import check_gradient, run


def drawn(seed=0, shape=(3, 5, 4)):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape), rng.uniform(0.5, 2, shape[-1]), rng.standard_normal(shape)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_bias_and_residual_are_added_after_the_gain(has_bias, has_residual):
    x, gain, residual = drawn()
    bias = np.arange(4.0) if has_bias else None
    (y,) = run("scale_columns_forward", [x.shape], x, gain, bias, residual if has_residual else None, dtype="fp64")
    expected = x * gain + (bias if has_bias else 0) + (residual if has_residual else 0)
    np.testing.assert_allclose(y, expected, rtol=1e-15)


def test_gradients_are_those_of_finite_differences():
    x, gain, d_y = drawn()
    found = run("scale_columns_backward", [x.shape, gain.shape], d_y, x, gain, dtype="fp64")

    def loss(x, gain):
        return np.sum(run("scale_columns_forward", [x.shape], x, gain, None, None, dtype="fp64")[0] * d_y)

    check_gradient(loss, [x, gain], found, 10 * np.abs(d_y).sum())


SCALE = 1.5


@pytest.mark.parametrize("first", [0, 3])
def test_the_gain_is_the_magnitude_over_the_norm_of_the_sum(first):
    rng = np.random.default_rng(first)
    weight, every, b = rng.standard_normal((9, 7)), rng.standard_normal((6, 7)), rng.standard_normal((9, 2))
    m = rng.uniform(1, 2, 9)
    read = (weight, weight @ every.T, every @ every.T, b, m)
    gain, norm = run("output_gain", [(9,), (9,)], *read, dtype="fp64", scale=SCALE, first=first)
    expected = np.linalg.norm(weight + SCALE * b @ every[first : first + 2], axis=1)
    np.testing.assert_allclose(norm, expected, rtol=1e-13)
    np.testing.assert_allclose(gain, m / expected, rtol=1e-13)


def test_rows_without_an_adapter_have_gain_one():
    numbers = {"dtype": "fp64", "scale": 1.0, "first": 0}
    gain, _ = run("output_gain", [(4,), (4,)], None, None, None, None, None, **numbers)
    assert np.array_equal(gain, np.ones(4))
    gain, _ = run("output_gain", [(4,), (4,)], None, None, None, None, np.arange(4.0)[:, None], **numbers)
    assert np.array_equal(gain, np.arange(4.0))
    (found,) = run("output_gain_backward", [(4, 1)], np.arange(4.0), None, dtype="fp64")
    assert np.array_equal(found, np.arange(4.0)[:, None])


def test_the_gradient_of_a_magnitude_is_that_of_its_quotient():
    d_gain, norm, m, step = np.array([3.0, -1.0]), np.array([2.0, 0.5]), np.array([1.0, 4.0]), 1e-6
    (found,) = run("output_gain_backward", [(2,)], d_gain, norm, dtype="fp64")
    slopes = d_gain * ((m + step) / norm - (m - step) / norm) / (2 * step)
    np.testing.assert_allclose(found, slopes, rtol=1e-8)


WEIGHT = 0.3


def kept_apart(a, present):
    """The regulariser's value of an adapter's rows."""
    return WEIGHT * np.linalg.norm(a @ a.T - np.diag(np.arange(len(a)) < present))


@pytest.mark.parametrize("present", [4, 3])
def test_orthogonality_is_the_gradient_of_the_norm(present):
    rng = np.random.default_rng(present)
    every, targets = rng.standard_normal((12, 9)), np.array([[1, -100, 0], [2, 5, -100]])
    every[4 + present : 8] = 0
    numbers = {"weight": WEIGHT, "first": 4, "present": present}
    (c,) = run("orthogonality", [(4, 12)], every @ every.T, targets, dtype="fp64", **numbers)
    found, own, step = c @ every, every[4:8], 1e-6
    for at in np.ndindex(own.shape):
        up, down = own.copy(), own.copy()
        up[at] += step
        down[at] -= step
        slope = 4 * (kept_apart(up, present) - kept_apart(down, present)) / (2 * step)
        np.testing.assert_allclose(found[at], slope, rtol=1e-6, atol=1e-7)
    assert np.array_equal(c[:, :4], np.zeros((4, 4))) and np.array_equal(c[:, 8:], np.zeros((4, 4)))
    numbers = {"weight": WEIGHT, "first": 0, "present": 3}
    (c,) = run("orthogonality", [(3, 3)], np.eye(3), targets, dtype="fp64", **numbers)
    assert np.array_equal(c, np.zeros((3, 3))), "what is orthogonal has no gradient"


def test_importance_is_smoothed_with_its_uncertainty():
    rng = np.random.default_rng(0)
    s, u, w, g = (rng.standard_normal((3, 4)) for _ in range(4))
    s, u, scale = np.abs(s), np.abs(u), np.array([0.25])
    about = {"dtype": "fp64", "beta_1": 0.9, "beta_2": 0.6}
    found = run("importance", [s.shape, u.shape], s, u, w, g, scale, np.ones(1), **about)
    now = np.abs(w * g / 4)
    smoothed = 0.9 * s + 0.1 * now
    np.testing.assert_allclose(found[0], smoothed, rtol=1e-14)
    np.testing.assert_allclose(found[1], 0.6 * u + 0.4 * np.abs(now - smoothed), rtol=1e-13)
    refused = run("importance", [s.shape, s.shape], s, u, w, g * np.nan, scale, np.zeros(1), **about)
    assert all(np.isnan(value).all() for value in refused)  # as they were: poisoned


def test_sums_of_rows_of_tiles_and_of_vectors():
    rng = np.random.default_rng(1)
    s, u = rng.uniform(size=(2, 200, 5))
    (tiles,) = run("importance_sums", [(2, 5)], s, u, dtype="fp64", of_columns=True)
    np.testing.assert_allclose(tiles, [(s * u)[:128].sum(axis=0), (s * u)[128:].sum(axis=0)], rtol=1e-13)
    (rows,) = run("importance_sums", [(200,)], s, u, dtype="fp64", of_columns=False)
    np.testing.assert_allclose(rows, (s * u).sum(axis=1), rtol=1e-13)
    (own,) = run("importance_sums", [(5,)], s[0], u[0], dtype="fp64", of_columns=False)
    assert np.array_equal(own, s[0] * u[0])


POSITIONS = np.array([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]], np.int32)
NUMBERS = {"num_virtual": 2, "channels": 3}


def drawn_virtual(seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, 5, 4)), rng.standard_normal((2, 3)), rng.standard_normal((2, 5, 4))


def forward(x, virtual):
    return run("virtual_tokens_forward", [x.shape], x, virtual, POSITIONS, dtype="fp64", **NUMBERS)[0]


def test_the_last_channels_of_first_tokens_are_replaced():
    x, virtual, _ = drawn_virtual()
    expected = x.copy()
    expected[0, :2, 1:] = expected[0, 3:, 1:] = expected[1, :2, 1:] = virtual
    np.testing.assert_array_equal(forward(x, virtual), expected)


def test_positions_may_be_ids_of_tokens():
    x, virtual, d_out = drawn_virtual()
    about = {"dtype": "fp64", **NUMBERS, "start": 40}
    ids = np.array([[39, 41, 7, 40, 42], [41, 41, 0, 40, 39]], np.int32)
    expected, rows = x.copy(), {(0, 1): 1, (0, 3): 0, (1, 0): 1, (1, 1): 1, (1, 3): 0}
    left, sums = d_out.copy(), np.zeros_like(virtual)
    for at, row in rows.items():
        expected[at][1:] = virtual[row]
        sums[row] += d_out[at][1:]
        left[at][1:] = 0
    np.testing.assert_array_equal(run("virtual_tokens_forward", [x.shape], x, virtual, ids, **about)[0], expected)
    d_x, d_virtual = run("virtual_tokens_backward", [x.shape, virtual.shape], d_out, ids, **about)
    np.testing.assert_array_equal(d_x, left)
    np.testing.assert_allclose(d_virtual, sums, rtol=1e-14)


def test_gradients_of_virtual_tokens_are_those_of_finite_differences():
    x, virtual, d_out = drawn_virtual()
    d_x, d_virtual = run("virtual_tokens_backward", [x.shape, virtual.shape], d_out, POSITIONS, dtype="fp64", **NUMBERS)
    rng, step = np.random.default_rng(1), 1e-6
    to_x, to_virtual = rng.standard_normal(x.shape), rng.standard_normal(virtual.shape)
    for gradient, direction, changed in (
        (d_x, to_x, lambda h: forward(x + h * to_x, virtual)),
        (d_virtual, to_virtual, lambda h: forward(x, virtual + h * to_virtual)),
    ):
        slope = np.sum((changed(step) - changed(-step)) * d_out) / (2 * step)
        assert slope == pytest.approx(float(np.sum(gradient * direction)), rel=1e-8)


def test_in_place_nothing_else_is_moved():
    x, about = Ref("x", "activation", (2, 5, 4), "fp32"), {"numbers": NUMBERS}
    reads = {"d_out": x, "positions": Ref("positions", "batch", (2, 5), "int32")}
    contract, replaced = record("virtual_tokens_backward"), 4 * 2 * 2 * 3
    virtual = Ref("virtual", "grad", (2, 3), "fp32")
    always = 4 * 10 + 4 * 6  # positions and the gradient of the matrix
    for writes, in_place, moved in (
        ({"d_x": (x,), "d_virtual": (virtual,)}, frozenset({"d_x"}), 2 * replaced),
        ({"d_x": (), "d_virtual": (virtual,)}, frozenset(), replaced),
        ({"d_x": (x,), "d_virtual": (virtual,)}, frozenset(), 2 * 4 * 40),
    ):
        call = Arguments(reads, writes, in_place=in_place, **about)
        assert contract.num_bytes(call) == moved + always
