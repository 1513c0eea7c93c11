"""What AdaLoRA adds to a step: the gradient of its regulariser, the importance of parameters, and sums of it."""

import numpy as np
import pytest

from .build import run

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


def test_what_is_orthogonal_has_no_gradient():
    targets = np.ones((1, 2), np.int32)
    (c,) = run("orthogonality", [(3, 3)], np.eye(3), targets, dtype="fp64", weight=WEIGHT, first=0, present=3)
    assert np.array_equal(c, np.zeros((3, 3)))


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


def test_a_refused_step_is_of_no_importance():
    s = np.ones((2, 3))
    found = run("importance", [s.shape, s.shape], s, s, s, s * np.nan, s[0, :1], np.zeros(1), beta_1=0.5, beta_2=0.5)
    assert all(np.isnan(value).all() for value in found)  # as they were: poisoned


def test_sums_of_rows_of_tiles_and_of_vectors():
    rng = np.random.default_rng(1)
    s, u = rng.uniform(size=(2, 200, 5))
    (tiles,) = run("importance_sums", [(2, 5)], s, u, dtype="fp64", of_columns=True)
    np.testing.assert_allclose(tiles, [(s * u)[:128].sum(axis=0), (s * u)[128:].sum(axis=0)], rtol=1e-13)
    (rows,) = run("importance_sums", [(200,)], s, u, dtype="fp64", of_columns=False)
    np.testing.assert_allclose(rows, (s * u).sum(axis=1), rtol=1e-13)
    (own,) = run("importance_sums", [(5,)], s[0], u[0], dtype="fp64", of_columns=False)
    assert np.array_equal(own, s[0] * u[0])
