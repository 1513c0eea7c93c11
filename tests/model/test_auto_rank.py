"""Ranks by spectra within a budget."""

import itertools

import numpy as np
import pytest

from llmq.adapters.rank_choice import MOST_RANK, ranks_within, spectrum


@pytest.mark.parametrize(("shape", "scale"), [((7, 12), 1.0), ((12, 7), 1e-25), ((300, 400), 1e-3), ((5, 5), 0.0)])
def test_a_spectrum_has_the_squares_of_the_largest_singular_values(shape, scale):
    gradient = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * np.float32(scale)
    wanted = np.linalg.svd(gradient.astype(np.float64), compute_uv=False)[:MOST_RANK] ** 2
    np.testing.assert_allclose(spectrum(gradient), wanted, rtol=1e-4, atol=1e-6 * wanted.max())


@pytest.mark.parametrize("seed", range(5))
def test_no_ranks_of_as_many_parameters_follow_more_of_the_gradients(seed):
    """Against all choices: with those parameters that are used, none has more."""
    rng = np.random.default_rng(seed)
    costs = {"a": 3, "b": 5, "c": 8}
    spectra = {name: np.sort(rng.random(4))[::-1] for name in costs}
    found = ranks_within(23, costs, spectra)
    used = sum(costs[name] * rank for name, rank in found.items())
    assert used <= 23 and all(costs[name] > 23 - used or found[name] == 4 for name in costs)

    def gain(ranks):
        return sum(spectra[name][:rank].sum() for name, rank in ranks.items())

    by_ratio = sorted((-value / costs[name], name) for name, values in spectra.items() for value in values)
    before_the_last = dict.fromkeys(costs, 0)
    left = 23
    for _, name in by_ratio:
        if costs[name] > left:
            break
        before_the_last[name], left = before_the_last[name] + 1, left - costs[name]
    assert all(found[name] >= rank for name, rank in before_the_last.items())
    for choice in itertools.product(range(5), repeat=3):
        other = dict(zip(costs, choice, strict=True))
        if sum(costs[name] * rank for name, rank in other.items()) <= 23 - left:
            assert gain(other) <= gain(before_the_last) + 1e-12


def test_what_brings_nothing_has_no_rank():
    assert ranks_within(100, {"a": 3, "b": 4}, {"a": np.zeros(4), "b": np.array([1.0, 0.0])}) == {"a": 0, "b": 1}
    assert ranks_within(2, {"a": 3}, {"a": np.ones(4)}) == {"a": 0}
