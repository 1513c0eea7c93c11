"""Copies in every form against a search through all codes and the recipe number by number; scales; errors; by hand."""

import ml_dtypes
import numpy as np
import pytest

from llmq.few_bits import DYNAMIC
from llmq.scaling import Nested
from llmq.tensor import DTYPES, LARGEST, Form, scale_shape, stored_shape

from .build import output, run, tensor
from .cases import OWN_SCALES

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
    """It is 1 where there is none, and has a finite reciprocal where that is tiny."""
    x = np.random.default_rng(0).standard_normal((5, 9)).astype(np.float32)
    (scale,) = run("amax_scale", [(1,)], x, dtype="fp32", limit=LARGEST[dtype])
    assert scale[0] == np.float32(np.abs(x).max()) / np.float32(LARGEST[dtype])
    stored = cast(x, Form(dtype, scaling="current"), scale[0]).tensors[0].array.astype(np.float32)
    assert np.abs(stored).max() == LARGEST[dtype]
    for values in ([[0.0, 0.0]], [[5.0, np.nan]], [[5.0, np.inf]], [[5.0, -np.inf]]):
        assert run("amax_scale", [(1,)], np.array(values), dtype="fp32", limit=448.0)[0][0] == 1
    tiny = np.array([[1e-44, 0.0]])
    (scale,) = run("amax_scale", [(1,)], tiny, dtype="fp32", limit=448.0)
    assert np.isfinite(np.float32(1) / scale[0])
    assert np.isfinite(cast(tiny, Form(dtype, scaling="current"), scale[0]).tensors[0].array.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # limits that are powers of two keep the quotients exact
        (
            ([7.0, 7.0], [[1.0, 8.0], [2.0, 1.0], [64.0, 1.0]], [4.0, 2.0], [16.0, 32.0], [1.0]),
            ([4 / 16, 8 / 32], [[4, 2], [1, 8], [2, 1]]),
        ),
        # a cell that has seen only zeros, and cells that saw infinity or NaN, beside one that moves on
        (
            ([5.0] * 4, [[0.0, 1.0, 1.0, 1.0], [0.0, 2.0, 2.0, 2.0]], [0.0, np.inf, np.nan, 4.0], [2.0] * 4, [1.0]),
            ([5, 5, 5, 2], [[0, 1, 1, 4], [0, 2, 2, 1]]),
        ),
        # a step that is not applied
        (([5.0], [[1.0], [2.0]], [3.0], [2.0], [0.0]), ([5], [[1], [2]])),
    ],
    ids=["largest", "unusable", "not applied"],
)
def test_the_delayed_scale_follows_the_largest_of_the_history(given, expected):
    arrays = [np.array(a, np.float32) for a in given]
    scale, history, amax = run("scale_update", [a.shape for a in arrays[:3]], *arrays, dtype="fp32")
    np.testing.assert_array_equal(scale, expected[0])
    np.testing.assert_array_equal(history, expected[1])
    np.testing.assert_array_equal(amax, 0)


def test_a_cast_of_a_quantized_tensor_reads_its_value():
    x = tensor(np.random.default_rng(0).standard_normal((6, 4)), None, Form("e4m3", "col", "delayed"), 0.02)
    (y,) = run("cast", [(6, 4)], x, dtype="fp32")
    np.testing.assert_array_equal(y, x.read())


FORMS = [
    Form(dtype, layout, scaling) for dtype in ("e4m3", "e5m2") for layout in ("row", "col") for scaling in OWN_SCALES
]
EVERY_FORM = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.key)
# ragged blocks in both directions, more than four of them (scales of tiles are padded), a single short one, three axes
SHAPES = [(130, 600), (2, 67, 300), (600, 130), (3, 5)]


def uneven(shape, seed=0):
    """Numbers of every magnitude, so that no two scales are alike."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, shape)).astype(np.float32)


def copy_of(x, form, dtype="fp32"):
    """The copy of x, through the op, in memory that was poisoned; f32 in."""
    out = output(x.shape, dtype, (form,))
    run("quantize", [out, output((1,), "fp32", ())], tensor(x, "fp32"), limit=LARGEST[form.dtype])
    return out.tensors[0]


def place_of_scale(form, row, column):
    """Where the scale of the number at (row, column) of the stored matrix lies."""
    return {"rowwise": (row,), "blockwise": (column // 128, row), "tilewise": (row // 128, column // 128)}[form.scaling]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@EVERY_FORM
def test_a_copy_is_the_recipe_number_by_number(form, shape):
    """Scale: the largest magnitude under it over the limit, in f32; byte: the value times the scale's reciprocal.

    Read again, a number is right to half a unit of the format's 3 or 2 mantissa bits, or of its smallest number under
    the largest scale.
    """
    x = uneven(shape)
    copy = copy_of(x, form)
    stored = x.reshape(-1, shape[-1]).T if form.layout == "col" else x.reshape(-1, shape[-1])
    at = place_of_scale(form, *np.indices(stored.shape))
    largest = np.zeros(scale_shape(shape, form), np.float32)
    np.maximum.at(largest, at, np.abs(stored))
    limit = np.float32(LARGEST[form.dtype])
    scales = np.where(largest > 0, largest / limit, np.float32(1))
    np.testing.assert_array_equal(copy.scale, scales)
    units = stored * (np.float32(1) / scales)[at]
    expected = np.clip(units, -limit, limit).astype(DTYPES[form.dtype])
    np.testing.assert_array_equal(copy.array.reshape(stored.shape).view(np.uint8), expected.view(np.uint8))
    unit, smallest = {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17)}[form.dtype]
    got = copy.read()
    assert got.shape == x.shape
    np.testing.assert_array_less(np.abs(got - x), (np.abs(x) * unit + copy.scale.max() * smallest) * (1 + 2.0**-20))


@EVERY_FORM
def test_scales_lie_as_cublaslt_reads_them(form):
    """Of a copy stored as (R, K): outer extents contiguous by row and by block, blocks of K contiguous by tile."""
    shape = (300, 2, 80)
    assert stored_shape(shape, form) == (shape if form.layout == "row" else (80, 600))
    expected = {
        ("rowwise", "row"): (600,),
        ("rowwise", "col"): (80,),
        ("blockwise", "row"): (1, 600),
        ("blockwise", "col"): (5, 80),
        ("tilewise", "row"): (5, 4),
        ("tilewise", "col"): (1, 8),
    }
    assert scale_shape(shape, form) == expected[form.scaling, form.layout]


@EVERY_FORM
def test_a_scale_is_of_the_value_as_rounded(form):
    x = np.full((4, 8), 1.0 + 2.0**-9, np.float32)  # 1 in bf16
    scale = copy_of(x, form, "bf16").scale
    assert scale.reshape(-1)[0] == np.float32(1 / LARGEST[form.dtype])


@pytest.mark.parametrize("broken", [0.0, np.nan, np.inf])
@EVERY_FORM
def test_without_a_finite_maximum_a_scale_is_1_and_the_others_are_as_before(form, broken):
    """All numbers under one scale are 0, or one of them is not finite."""
    x = uneven((260, 520))
    right = copy_of(x, form)
    spoilt = x.copy()
    stored = spoilt.T if form.layout == "col" else spoilt
    group = {"rowwise": np.s_[130:131], "blockwise": np.s_[130:131, 128:256], "tilewise": np.s_[128:256, 128:256]}[
        form.scaling
    ]
    stored[group if broken == 0 else np.s_[130, 140]] = broken
    copy = copy_of(spoilt, form)
    at = place_of_scale(form, 130, 140)
    assert copy.scale[at] == 1 and right.scale[at] != 1
    copy.scale[at] = right.scale[at]
    np.testing.assert_array_equal(copy.scale, right.scale)
    copy.array[group] = right.array[group]
    np.testing.assert_array_equal(copy.array.view(np.uint8), right.array.view(np.uint8))


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_the_scale_of_the_whole_is_that_of_amax_scale(dtype):
    """Whether copies are wanted or not."""
    x, limit = uneven((67, 300)), LARGEST[dtype]
    (expected,) = run("amax_scale", [(1,)], x, dtype="fp32", limit=limit)
    for forms in ((), (Form(dtype, "row", "rowwise"), Form(dtype, "col", "blockwise"))):
        outputs = [output(x.shape, "fp32", forms), output((1,), "fp32")]
        run("quantize", outputs, x, dtype="fp32", limit=limit)
        np.testing.assert_array_equal(outputs[1].tensors[0].array, expected)


@EVERY_FORM
def test_rows_are_taken_out_where_their_scales_lie_together(form):
    """Rows of a tensor: one scale each or, in the transposed copy, one per column or blocks that end with them."""
    x = uneven((300, 24))
    copy = copy_of(x, form)
    parts = {"row/rowwise": (8, 16), "col/rowwise": (8, 16), "col/blockwise": (128, 172)}
    start, count = parts.get(form.key.split("/", 1)[1], (8, 16))
    if form.key.split("/", 1)[1] in parts:
        np.testing.assert_array_equal(copy.chunk(start, count).read(), copy.read()[start : start + count])
    else:
        with pytest.raises(AssertionError, match="lie together"):
            copy.chunk(start, count)


def errors(x, dtype="e4m3", scale=1.0, start=(0,) * 6):
    """What the op finds in `x` and its copy."""
    copy = tensor(np.float32(x), None, Form(dtype, "row", "delayed"), scale)
    (found,) = run("quantization_error", [output((6,), "fp32")], np.float32(start), np.float32(x), copy, dtype="fp32")
    return found


def test_the_six_numbers_by_hand():
    # between 256 and 448 the format has multiples of 32: 300 goes to 288
    by_hand = [500, 1 + 9e4 + 25e4 + 1e-8, 12**2 + 52**2 + 1e-8, 1, 1, 5]
    assert errors([[1.0, 300.0, 500.0, 1e-4, 0.0]]).tolist() == pytest.approx(by_hand)
    # numbers that are not finite count only; findings add up, and the largest stays
    assert errors([[np.nan, np.inf, -np.inf, 2.0]]).tolist() == [2, 4, 0, 0, 0, 4]
    assert errors([[2.0, 4.0]], start=(3, 1, 1, 1, 1, 1)).tolist() == [4, 21, 1, 1, 1, 3]
    for dtype, edge in (("e4m3", 464.0), ("e5m2", 61440.0)):  # what rounding alone moves is not clipped
        values = np.array([[edge, np.nextafter(np.float32(edge), np.float32(1e9)), -edge * 2]]) * 2.0**-5
        assert errors(values, dtype, 2.0**-5)[3] == 2


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


def nest(absmax, group, borders):
    """The bytes of scales."""
    made = output(Nested(group).shape(len(absmax), 64), "uint8")
    return run("nest", [made], tensor(np.array(absmax), "fp32"), group=group, borders=borders)[0]


def test_two_scales_are_a_step_from_their_mean_which_tensors_do_not_share():
    stored = nest([1.0, 3.0], 256, (2,))
    np.testing.assert_array_equal(stored[:1024].view(np.float32), DYNAMIC)
    assert stored[1024:-2].view(np.float32).tolist() == [1.0, 2.0], "the largest distance from the mean, and the mean"
    assert stored[-2:].tolist() == [0, 255]
    np.testing.assert_allclose(Nested(256).absmax(stored, 2), [1, 3], rtol=0.01)
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
    x[150, 1] = np.nan  # a number that is none is the largest
    assert form or np.isnan(run("amax", [(1,)], x, dtype="fp32", in_bf16=False)[0])
