"""Casts to every form against a search through all codes, current and delayed scales."""

import ml_dtypes
import numpy as np
import pytest

from llmq.tensor import LARGEST, Form

from .build import output, run, tensor

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
EIGHT = pytest.mark.parametrize("dtype", TYPES)


def cast(x, form, scale, dtype="fp32", amax=None):
    out = output(x.shape, dtype, (form,), scale=scale, amax=amax)
    run("cast", [out], x, dtype=dtype)
    return out


@EIGHT
def test_a_value_becomes_the_nearest_code_ties_to_even(dtype):
    """Every finite code, every midpoint of neighbours, and values beyond the last code, with scale 1."""
    codes = np.arange(256, dtype=np.uint8)
    value = codes.view(TYPES[dtype]).astype(np.float64)
    finite = np.isfinite(value)
    codes, value = codes[finite], value[finite]
    positive = np.unique(value[value >= 0])
    middles = (positive[1:] + positive[:-1]) / 2
    rng = np.random.default_rng(0)
    x = np.concatenate([value, middles, -middles, rng.uniform(0, 1.2, 300) * LARGEST[dtype], rng.standard_normal(300)])
    x = x.astype(np.float32).astype(np.float64)
    stored = cast(x, Form(dtype, scaling="delayed"), 1.0).tensors[0].array.astype(np.float64)
    for given, got in zip(x, stored, strict=True):
        distance = np.abs(value - given)
        nearest = np.flatnonzero(distance == distance.min())
        even = (
            [value[i] for i in nearest if codes[i] % 2 == 0] if len(np.unique(value[nearest])) > 1 else value[nearest]
        )
        assert got in even, (given, got)


@EIGHT
def test_saturation_and_nan(dtype):
    limit = LARGEST[dtype]
    x = np.array([[limit * 2, -limit * 2, np.inf, -np.inf, np.nan, limit]])
    with np.errstate(invalid="ignore"):
        stored = cast(x, Form(dtype, scaling="delayed"), 1.0).tensors[0].array.astype(np.float32)
    np.testing.assert_array_equal(stored, [[limit, -limit, limit, -limit, np.nan, limit]])


def test_the_scale_multiplies_by_one_f32_reciprocal():
    """x / scale and x * (1 / scale) round differently for some x: the second is the format's definition."""
    scale = np.float32(0.3)
    x = np.random.default_rng(0).uniform(-100, 100, (64, 64)).astype(np.float32)
    stored = cast(x, Form("e4m3", scaling="current"), scale).tensors[0]
    np.testing.assert_array_equal(
        stored.array.view(np.uint8), (x * (np.float32(1) / scale)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    )
    # half a unit of e4m3's 3 mantissa bits, or half its smallest subnormal 2^-9, and an f32 rounding each way
    bound = np.maximum(np.abs(x) * 2**-4, scale * 2**-10) * (1 + 2**-22)
    assert (np.abs(stored.read() - x) <= bound).all()


@pytest.mark.parametrize("shape", [(3, 5, 7), (600, 4), (8,)])
def test_column_form_is_the_transpose(shape):
    x = np.random.default_rng(0).standard_normal(shape)
    rows = cast(x, Form("e5m2", "row", "delayed"), 0.01).tensors[0]
    columns = cast(x, Form("e5m2", "col", "delayed"), 0.01).tensors[0]
    assert columns.array.shape == (shape[-1], x.size // shape[-1])
    np.testing.assert_array_equal(columns.array, rows.array.reshape(-1, shape[-1]).T)
    np.testing.assert_array_equal(columns.read(), rows.read())
    assert columns.read().shape == shape


def test_amax_is_of_the_rounded_value_and_grows():
    x = np.array([[1.0, -3.0078125]])  # rounds to -3 in bf16
    assert cast(x, Form("e4m3", scaling="delayed"), 1.0, "bf16", amax=0.0).amax["e4m3"][0] == 3.0
    assert cast(x, Form("e4m3", scaling="delayed"), 1.0, "bf16", amax=9.0).amax["e4m3"][0] == 9.0
    assert np.isnan(cast(x * np.nan, Form("e4m3", scaling="delayed"), 1.0, "bf16", amax=9.0).amax["e4m3"][0])


@EIGHT
def test_the_current_scale_maps_the_largest_value_to_the_limit(dtype):
    x = np.random.default_rng(0).standard_normal((5, 9)).astype(np.float32)
    (scale,) = run("amax_scale", [(1,)], x, dtype="fp32", limit=LARGEST[dtype])
    assert scale[0] == np.float32(np.abs(x).max()) / np.float32(LARGEST[dtype])
    stored = cast(x, Form(dtype, scaling="current"), scale[0]).tensors[0].array.astype(np.float32)
    assert np.abs(stored).max() == LARGEST[dtype]


@pytest.mark.parametrize("x", [0.0, np.nan, np.inf, -np.inf])
def test_the_current_scale_of_nothing_is_1(x):
    values = np.array([[0.0, x]]) if x == 0 else np.array([[5.0, x]])
    assert run("amax_scale", [(1,)], values, dtype="fp32", limit=448.0)[0][0] == 1


def test_a_tiny_value_has_a_scale_with_a_finite_reciprocal():
    x = np.array([[1e-44, 0.0]])
    (scale,) = run("amax_scale", [(1,)], x, dtype="fp32", limit=448.0)
    assert np.isfinite(np.float32(1) / scale[0])
    assert np.isfinite(cast(x, Form("e4m3", scaling="current"), scale[0]).tensors[0].array.astype(np.float32)).all()


def updated(scale, history, amax, limits, apply=1.0):
    arrays = [np.array(a, np.float32) for a in (scale, history, amax, limits, [apply])]
    shapes = [arrays[0].shape, arrays[1].shape, arrays[2].shape]
    return run("scale_update", shapes, *arrays, dtype="fp32")


def test_the_delayed_scale_follows_the_largest_of_the_history():
    """Limits that are powers of two keep the quotients exact."""
    scale, history, amax = [7.0, 7.0], [[1.0, 8.0], [2.0, 1.0], [64.0, 1.0]], [4.0, 2.0]
    scale, history, amax = updated(scale, history, amax, [16.0, 32.0])
    np.testing.assert_array_equal(history, [[4, 2], [1, 8], [2, 1]])
    np.testing.assert_array_equal(scale, [4 / 16, 8 / 32])
    np.testing.assert_array_equal(amax, [0, 0])


def test_a_scale_without_a_usable_maximum_is_kept():
    """A cell that has seen only zeros, and cells that saw infinity or NaN, beside one that moves on."""
    history = [[0.0, 1.0, 1.0, 1.0], [0.0, 2.0, 2.0, 2.0]]
    scale, pushed, amax = updated([5.0] * 4, history, [0.0, np.inf, np.nan, 4.0], [2.0] * 4)
    np.testing.assert_array_equal(scale, [5, 5, 5, 2])
    np.testing.assert_array_equal(pushed, [[0, 1, 1, 4], [0, 2, 2, 1]])
    np.testing.assert_array_equal(amax, 0)


def test_a_step_that_is_not_applied_changes_no_scale():
    scale, history, amax = updated([5.0], [[1.0], [2.0]], [3.0], [2.0], apply=0.0)
    np.testing.assert_array_equal(scale, [5])
    np.testing.assert_array_equal(history, [[1], [2]])
    np.testing.assert_array_equal(amax, [0])


def test_a_cast_of_a_quantized_tensor_reads_its_value():
    x = tensor(np.random.default_rng(0).standard_normal((6, 4)), None, Form("e4m3", "col", "delayed"), 0.02)
    (y,) = run("cast", [(6, 4)], x, dtype="fp32")
    np.testing.assert_array_equal(y, x.read())
