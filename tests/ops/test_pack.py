"""Scales of NF4 in 8 bits, and largest magnitudes, by hand."""

import numpy as np
import pytest

from llmq.few_bits import DYNAMIC
from llmq.scaling import Nested
from llmq.tensor import Form

from .build import output, run, tensor


def nest(absmax, group, borders):
    """The bytes of scales."""
    made = output(Nested(group).shape(len(absmax), 64), "uint8")
    return run("nest", [made], tensor(np.array(absmax), "fp32"), group=group, borders=borders)[0]


def test_two_scales_are_a_step_from_their_mean():
    stored = nest([1.0, 3.0], 256, (2,))
    np.testing.assert_array_equal(stored[:1024].view(np.float32), DYNAMIC)
    assert stored[1024:-2].view(np.float32).tolist() == [1.0, 2.0], "the largest distance from the mean, and the mean"
    assert stored[-2:].tolist() == [0, 255]
    np.testing.assert_allclose(Nested(256).absmax(stored, 2), [1, 3], rtol=0.01)


def test_tensors_share_no_mean():
    stored = nest([1.0, 3.0, 50.0, 50.0], 2, (2, 4))
    assert stored[1024:-4].view(np.float32).tolist() == [1.0, 2.0, 0.0, 50.0]
    np.testing.assert_allclose(Nested(2).absmax(stored, 4), [1, 3, 50, 50], rtol=0.01)


@pytest.mark.parametrize("form", [None, Form("int8", "row", "rowwise"), Form("mxfp4", "row", "exponents")])
def test_the_largest_magnitude_is_that_of_what_is_read(form):
    x = np.random.default_rng(0).standard_normal((300, 64))
    x[299, 7] = -5.03
    stored = tensor(x, None, form) if form else tensor(x, "fp32")
    assert np.abs(stored.read()).max() == np.abs(stored.read()[299, 7])
    for in_bf16 in (False, True):
        right = np.abs(stored.read()[299, 7])
        right = right if not in_bf16 else right.astype(tensor(x, "bf16").array.dtype)
        assert run("amax", [(1,)], stored, dtype="fp32", in_bf16=in_bf16)[0] == np.float32(right)


def test_a_number_that_is_none_is_the_largest():
    x = np.ones((400, 3))
    x[150, 1] = np.nan
    assert np.isnan(run("amax", [(1,)], x, dtype="fp32", in_bf16=False)[0])
