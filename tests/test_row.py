"""Parts of rows: tensors of files whose rows lie in another order, or that are transposed."""

import numpy as np
import pytest

from llmq.row import HeadOrder, Part

ORDERS = {
    "halves": (HeadOrder(8, 4), [0, 1, 4, 5, 2, 3, 6, 7]),
    "neighbours": (HeadOrder(8, 8, interleaved=True), [0, 2, 4, 6, 1, 3, 5, 7]),
    "some neighbours": (HeadOrder(8, 4, interleaved=True), [0, 2, 4, 5, 1, 3, 6, 7]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_heads_are_held_as_they_are_turned(name):
    """By hand: the held channels, by their places in the file."""
    order, held = ORDERS[name]
    part, whole = Part("q", 3, 19, order), np.full((20, 2), -1)
    part.put(whole, file := np.arange(32).reshape(16, 2))
    np.testing.assert_array_equal(whole[3:19, 0] // 2, [*held, *(8 + place for place in held)])
    assert (whole[:3] == -1).all() and (whole[19] == -1).all()
    np.testing.assert_array_equal(part.take(whole), file)


@pytest.mark.parametrize(
    "part",
    [
        Part("some heads", 2, 18, HeadOrder(8, 4, turned=1)),
        Part("columns", 2, 18, HeadOrder(4, 2, axis=1)),
        Part("transposed", 2, 18, transposed=True),
    ],
    ids=lambda part: part.name,
)
def test_slices_of_tensors_go_both_ways(part):
    whole = np.zeros((19, 8))
    file = np.random.default_rng(0).standard_normal(part.shape(whole.shape))
    for start in range(0, len(file), 3):
        part.put(whole, file[start : start + 3], start)
    for start, stop in ((0, 5), (5, len(file))):
        np.testing.assert_array_equal(part.take(whole, start, stop), file[start:stop])
    assert not whole[:2].any() and not whole[18:].any() and whole[2:18].all()


def test_heads_that_are_not_turned_stay_and_a_smaller_tensor_leaves_the_rest():
    part, whole = Part("some heads", 0, 16, HeadOrder(8, 4, turned=1)), np.zeros((16, 4))
    part.put(whole, np.repeat(np.arange(1.0, 17)[:, None], 3, axis=1))
    np.testing.assert_array_equal(whole[:, 0], [1, 2, 5, 6, 3, 4, 7, 8, *range(9, 17)])
    assert whole[:, :3].all() and not whole[:, 3].any()
