"""Rows held in a form: the copy that a whole quantization would make, by slices, and what it means."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from llmq.model.held import held_copy, held_value
from llmq.operands import Output, Tensor
from llmq.ops import reference
from llmq.tensor import DTYPES, LARGEST, Form, Ref, scale_shape

FORMS = {scaling: Form("e4m3", "row", scaling) for scaling in ("current", "tilewise")}
EVERY = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def value_of(shape, dtype="fp32"):
    """Numbers whose tiles have magnitudes of their own; one tile is zero."""
    rows, columns = np.indices(shape) // 128
    value = np.random.default_rng(0).standard_normal(shape) * 2.0 ** (rows - 2.0 * columns)
    value[:128, 128:256] = 0
    return value.astype(DTYPES[dtype])


def whole_copy(value, form):
    """The copy that the ops of a plan make."""
    wide = value.astype(DTYPES["bf16"]).astype(np.float32)
    x, limit = Tensor("x", wide, wide.shape), LARGEST[form.dtype]
    scale = np.zeros(scale_shape(wide.shape, form), np.float32)
    shape = wide.shape if form.layout == "row" else wide.shape[::-1]
    copy = Tensor("x", np.zeros(shape, DTYPES[form.dtype]), wide.shape, form, scale)
    out, unwanted = Output("x", wide.shape, "bf16", (copy,)), Output("unwanted", (), "fp32", ())
    if form.owns_scales:
        reference.OPS["quantize"](out, unwanted, x, limit=limit)
    else:
        reference.OPS["amax_scale"](Output("s", (1,), "fp32", (Tensor("s", scale, (1,)),)), x, limit=limit)
        reference.OPS["cast"](out, x)
    return copy


@EVERY
@pytest.mark.parametrize("shape", [(300, 520), (128, 1024), (5, 48)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_slices_make_the_copy_of_the_whole(form, shape, dtype):
    value = value_of(shape, dtype)
    numbers, scale = held_copy(Ref("w", "weight", shape, "bf16", form=form), value)
    expected = whole_copy(value, form)
    assert numbers.tobytes() == expected.array.tobytes() and scale.tobytes() == expected.scale.tobytes()
    read = held_value(replace(expected, array=numbers, scale=scale), "bf16")
    np.testing.assert_array_equal(read, expected.read().astype(DTYPES["bf16"]))
    error = np.abs(read.astype(np.float64) - value.astype(np.float64)).max()
    assert 0 < error <= 2.0**-4 * float(np.abs(value).max()), "half a step of e4m3"


@EVERY
def test_columns_turned_from_rows_are_those_quantized_from_the_value(form):
    """The same bytes and scales, with the padding of both."""
    value, col = value_of((300, 520)), replace(form, layout="col")
    rows, expected = whole_copy(value, form), whole_copy(value, col)
    scale = rows.scale if not form.owns_scales else np.zeros(scale_shape(value.shape, col), np.float32)
    turned = Tensor("x", np.zeros_like(expected.array), value.shape, col, scale)
    reference.OPS["cast"](Output("x", value.shape, "bf16", (turned,)), rows)
    assert turned.array.tobytes() == expected.array.tobytes() and scale.tobytes() == expected.scale.tobytes()


@pytest.mark.quick("tilewise")
@EVERY
def test_a_large_row_is_never_there_in_f32(form):
    value = np.random.default_rng(0).standard_normal((16384, 512), np.float32).astype(DTYPES["bf16"])
    tracemalloc.start()
    numbers, scale = held_copy(Ref("w", "weight", value.shape, "bf16", form=form), value)
    held_value(Tensor("w", numbers, value.shape, form, scale), "bf16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    slices = 128 * 512 * 4
    assert peak <= value.size * (1 + 2) + 8 * slices < value.size * 4
