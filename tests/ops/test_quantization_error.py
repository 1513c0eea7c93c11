"""Statistics of fp8 copies, by hand."""

import numpy as np
import pytest

from llmq.tensor import Form

from .build import output, run, tensor
from .cases import OWN_SCALES


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


@pytest.mark.parametrize("scaling", OWN_SCALES)
def test_each_number_is_judged_by_its_own_scale(scaling):
    """Blocks of very different size in one tensor: nothing is clipped or flushed, and the error is rounding's."""
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 2, (256, 256)) * np.repeat(10.0 ** np.arange(-4, 4, 4), 128)[:, None]
    copy = tensor(x, None, Form("e4m3", "row", scaling))
    (found,) = run("quantization_error", [output((6,), "fp32")], np.zeros(6, np.float32), x, copy, dtype="fp32")
    assert found[2] == pytest.approx(np.square(x - copy.read()).sum(), rel=1e-3)
    assert found[3:].tolist() == [0, 0, x.size]
    assert found[2] <= 2.0**-8 * found[1]  # an eighth of a number between its neighbours, half of that at worst


def test_findings_add_up_and_the_largest_stays():
    assert errors([[2.0, 4.0]], start=(3, 1, 1, 1, 1, 1)).tolist() == [4, 21, 1, 1, 1, 3]
