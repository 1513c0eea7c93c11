"""Lifetimes to offsets: no overlap in time and space, aligned, close to what is alive at once."""

from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.plan.arena import ALIGNMENT, Lifetime, aligned, lay_out, live_peak

lifetimes = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 20), st.integers(0, 20)).map(
        lambda x: Lifetime(x[0], min(x[1:]), max(x[1:]))
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(lifetimes)
def test_what_is_alive_at_once_does_not_overlap(lives):
    offsets, total = lay_out(lives)
    assert all(offset % ALIGNMENT == 0 for offset in offsets)
    assert total == max((o + aligned(life.size) for o, life in zip(offsets, lives, strict=True)), default=0)
    assert live_peak(lives) <= total <= sum(aligned(life.size) for life in lives)
    for i, a in enumerate(lives):
        for j, b in enumerate(lives[:i]):
            if a.first <= b.last and b.first <= a.last:
                assert offsets[i] + a.size <= offsets[j] or offsets[j] + b.size <= offsets[i]


def test_a_stack_of_lifetimes_is_laid_out_without_a_gap():
    # forward makes 0..9, backward frees them in reverse, as kept activations do
    lives = [Lifetime(1000 + 300 * i, i, 20 - i) for i in range(10)]
    assert lay_out(lives)[1] == live_peak(lives)


def test_memory_that_is_free_again_is_used_again():
    assert lay_out([Lifetime(512, 0, 1), Lifetime(512, 2, 3), Lifetime(512, 4, 5)])[1] == 512
