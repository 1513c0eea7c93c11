"""The order of samples: a permutation of every size, different for every epoch and seed, and well mixed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmq.data.batches.rows import sample_order


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 3000) | st.sampled_from([4096, 4097, 65535, 65536]),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 10**6),
)
@example(size=1_000_003, seed=7, epoch=0)
@pytest.mark.slow
def test_every_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = sample_order(epoch * size + np.arange(size), size, seed)
    assert np.array_equal(np.sort(order), np.arange(size))


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 10**12), place=st.integers(0, 10**15), seed=st.integers(-(2**63), 2**64 - 1))
def test_a_place_alone_has_the_sample_that_it_has_among_others(size: int, place: int, seed: int) -> None:
    many = sample_order(place + np.arange(5), size, seed)
    alone = [int(sample_order(np.array([place + i]), size, seed)[0]) for i in range(5)]
    assert many.tolist() == alone and (many >= 0).all() and (many < size).all()


def test_epochs_and_seeds_differ_and_are_no_shifts_of_each_other() -> None:
    n = 1000
    base = sample_order(np.arange(n), n, 1)
    for places, seed in [
        (n + np.arange(n), 1),
        (2 * n + np.arange(n), 1),
        (np.arange(n), 2),
        (np.arange(n), 2**32 + 1),
    ]:
        other = sample_order(places, n, seed)
        # Of two independent permutations, 1 place in expectation agrees (Poisson: > 8 has probability 1e-6), whatever
        # the shift; over 1000 shifts, > 10 has 1e-5.
        assert max(np.count_nonzero(np.roll(base, shift) == other) for shift in range(n)) <= 10


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16, 23, 100])
def test_every_sample_comes_equally_often_at_every_place(size: int) -> None:
    epochs = 4000
    orders = sample_order(np.arange(epochs * size), size, 3).reshape(epochs, size)
    counts = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    chi2 = ((counts - epochs / size) ** 2 / (epochs / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom) + 5


def test_all_orders_of_four_are_equally_likely() -> None:
    orders = sample_order(np.arange(4 * 24_000), 4, 11).reshape(-1, 4)
    _, counts = np.unique(orders @ [64, 16, 4, 1], return_counts=True)
    assert len(counts) == 24 and ((counts - 1000) ** 2 / 1000).sum() < 23 + 5 * np.sqrt(46)


def test_neighbours_are_thrown_apart() -> None:
    n = 100_003
    order = sample_order(np.arange(n), n, 5)
    steps = np.diff(order)
    # Steps between neighbours of a random permutation: |difference| has mean n / 3; few are the same number twice.
    assert abs(np.abs(steps).mean() / n - 1 / 3) < 0.01
    assert np.count_nonzero(np.abs(steps) == 1) < 15  # expected 2
    assert np.unique(steps, return_counts=True)[1].max() < 15  # expected at most 1 on average
    position = np.arange(n)
    assert abs(np.corrcoef(position, order)[0, 1]) < 0.02  # 1 / sqrt(n) = 0.003
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    for half in (order % 2, order < n / 2, order % 317 < 158):
        runs = np.count_nonzero(np.diff(half.astype(int))) / n
        assert abs(runs - 0.5) < 0.01
