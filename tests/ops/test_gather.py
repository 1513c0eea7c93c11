"""One row of each sequence."""

import numpy as np
import pytest

from .cases import LARGE, ODD, make


@pytest.mark.parametrize("size", [ODD, LARGE])
def test_one_position_of_each_sequence(size):
    case = make("gather_rows", size)
    x, index = case.inputs.values()
    out = case.values("fp64")["out"]
    for b in range(size.b):
        np.testing.assert_array_equal(out[b, 0], x[b, index[b]])
