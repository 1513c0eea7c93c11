"""Weights of a bench by hand."""

import numpy as np

from .build import run


def test_a_block_goes_on_where_it_ends():
    block = np.array([1.0, 2.0, 3.0])
    assert run("repeat", [(2, 4)], block, first=0)[0].tolist() == [[1, 2, 3, 1], [2, 3, 1, 2]]
    assert run("repeat", [(2, 4)], block, first=5)[0].tolist() == [[3, 1, 2, 3], [1, 2, 3, 1]]
    assert run("repeat", [(2,)], block, first=2**40 * 3 + 1)[0].tolist() == [2, 3]
