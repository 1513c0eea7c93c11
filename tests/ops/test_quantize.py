"""Copies with scales of their own: against the recipe said number by number, and what no finite maximum gives."""

import numpy as np
import pytest

from llmq.tensor import DTYPES, LARGEST, Form, scale_shape, stored_shape

from .build import output, run, tensor
from .cases import OWN_SCALES

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
