"""Statistics of fp8 copies, by hand."""

import numpy as np
import pytest

from llmq.tensor import Form

from .build import output, run, tensor


def errors(x, dtype="e4m3", scale=1.0, start=(0,) * 6):
    """What the op finds in `x` and its copy."""
    copy = tensor(np.float32(x), None, Form(dtype, "row", "delayed"), scale)
    (found,) = run("quantization_error", [output((6,), "fp32")], np.float32(start), np.float32(x), copy, dtype="fp32")
    return found


def test_the_six_numbers_by_hand():
    # between 256 and 448 the format has multiples of 32: 300 goes to 288
    assert errors([[1.0, 300.0, 500.0, 1e-4, 0.0]]).tolist() == pytest.approx(
        [500, 1 + 9e4 + 25e4 + 1e-8, 12**2 + 52**2 + 1e-8, 1, 1, 5]
    )


@pytest.mark.parametrize(("dtype", "edge"), [("e4m3", 464.0), ("e5m2", 61440.0)])
def test_what_rounding_alone_moves_is_not_clipped(dtype, edge):
    values = np.array([[edge, np.nextafter(np.float32(edge), np.float32(1e9)), -edge * 2]]) * 2.0**-5
    assert errors(values, dtype, 2.0**-5)[3] == 2


def test_numbers_that_are_not_finite_count_only():
    assert errors([[np.nan, np.inf, -np.inf, 2.0]]).tolist() == [2, 4, 0, 0, 0, 4]


def test_findings_add_up_and_the_largest_stays():
    assert errors([[2.0, 4.0]], start=(3, 1, 1, 1, 1, 1)).tolist() == [4, 21, 1, 1, 1, 3]
