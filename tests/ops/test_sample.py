"""The next token: what top-k, top-p and min-p leave, ties, the share of each token, the repetition penalty."""

import numpy as np
import pytest

from llmq.ops.reference.sample import gumbel, threshold

from .build import run

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}


def drawn(logits, count=1, **numbers) -> np.ndarray:
    """`count` tokens from the same logits, each at a position of its own."""
    rows = np.broadcast_to(logits, (count, 1, len(logits)))
    positions = np.arange(count, dtype=np.int32)[:, None]
    shapes = [(count, 1), (count, 1)]
    given = (rows, positions, np.zeros(count, np.int32))
    tokens, after = run("sample", shapes, *given, vocab_size=len(logits), **{**OFF, **numbers})
    assert (after == positions + 1).all()
    return tokens[:, 0].astype(int)


def test_temperature_zero_takes_the_first_of_the_largest():
    assert drawn(np.array([1.0, 3.0, 2.0, 3.0]), temperature=0.0)[0] == 1


@pytest.mark.parametrize(
    ("cuts", "left"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1, 2}),  # two are equal
        ({"top_k": 1}, {0}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.45}, {0, 1, 2}),
        ({"top_p": 0.85}, {0, 1, 2, 3}),
        ({"min_p": 0.45}, {0, 1, 2}),
        (
            {"top_k": 3, "top_p": 0.4, "min_p": 0.01},
            {0},
        ),  # 0.4 of the 0.8 that top-k leaves, of which the first has half
    ],
)
def test_the_cuts_leave_the_most_likely(cuts, left):
    """Of probabilities 0.4, 0.2, 0.2, 0.15, 0.05."""
    tokens = drawn(np.log([0.4, 0.2, 0.2, 0.15, 0.05]) + 3, 500, **cuts)
    assert set(tokens) == left


def test_tokens_come_in_proportion():
    """2000 draws: within five standard deviations, at two temperatures."""
    p = np.array([0.5, 0.3, 0.15, 0.05])
    for temperature in (1.0, 0.5):
        expected = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
        found = np.bincount(drawn(np.log(p), 2000, temperature=temperature), minlength=4) / 2000
        assert (np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / 2000)).all()


def test_noise_is_gumbels_and_depends_on_its_address_alone():
    """Mean 0.5772 and variance pi^2 / 6 of 2^18 numbers, to five standard errors; a shorter row has the same."""
    noise = gumbel(3 + 2**40, 9, 5, 2**18)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 5 * np.sqrt(np.pi**2 / 6 / 2**18)
    assert abs(noise.var() - np.pi**2 / 6) < 0.05
    np.testing.assert_array_equal(gumbel(3 + 2**40, 9, 5, 77), noise[:77])
    for other in ((4 + 2**40, 9, 5), (3, 9, 5), (3 + 2**40, 8, 5), (3 + 2**40, 9, 4)):
        assert not np.array_equal(gumbel(*other, 77), noise[:77])


def test_equal_logits_stay_together():
    z = np.zeros(10, np.float32)
    assert threshold(z, top_k=3, top_p=0.5, min_p=0.5) <= 0


def test_the_penalty_lowers_seen_tokens_and_the_one_that_is_read():
    logits = np.array([[[2.0, -2.0, 2.0, -2.0, 2.0]]])
    seen, token = np.array([[1, 1, 0, 0, 0]], np.int32), np.array([[4]], np.int32)
    out, after = run("penalize", [(1, 1, 5), (1, 5)], logits, seen, token, penalty=2.0)
    np.testing.assert_array_equal(out[0, 0], [1, -4, 2, -2, 1])
    np.testing.assert_array_equal(after[0], [1, 1, 0, 0, 1])
