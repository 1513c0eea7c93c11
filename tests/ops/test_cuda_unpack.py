"""What frozen weights of 4 and 8 bits stand for, on the GPU: in every form byte by byte as on the CPU."""

import math
from dataclasses import replace

import numpy as np
import pytest

from llmq.model.held import held_copy
from llmq.operands import Tensor
from llmq.ops.reference import OPS
from llmq.tensor import Form, Ref

from .build import output
from .cuda_build import Device
from .test_quantize import uneven

pytestmark = pytest.mark.gpu(emulated="(66, 128)")
INT8, NF4, MXFP4 = Form("int8", "row", "rowwise"), Form("nf4", "row", "nested256"), Form("mxfp4", "row", "exponents")
HELD = {"int8": (INT8, 1), "nf4": (NF4, 1), "nf4 in halves": (NF4, 2), "mxfp4": (MXFP4, 1)}
EVERY = pytest.mark.parametrize(("form", "parts"), HELD.values(), ids=HELD)
ROW, COL = (Form("e4m3", layout, "current") for layout in ("row", "col"))
FORMS = {"value": (None,), "rows": (ROW,), "columns": (COL,), "both": (ROW, COL)}
SHAPES = [(66, 128), (128, 6), (64, 44), (320, 520), (1024, 896)]


def held(shape, form, parts, seed=0):
    """A weight with rows of every magnitude, some of them zero, in `form`; NF4 of one tensor, or of two halves."""
    value = uneven(shape, seed)
    value[:: max(1, shape[0] // 5)] = 0
    borders = [shape[0] * (part + 1) // parts for part in range(parts)]
    if parts > 1:
        form = replace(form, scaling=f"nested{math.gcd(256, borders[0] * shape[1] // 64)}")
    numbers, scale = held_copy(Ref("w", "weight", shape, "bf16", form=form), value, borders)
    return Tensor("w", numbers, shape, form, scale)


def check(x, dtype, forms):
    expected, got = ({"out": output(x.shape, dtype, forms, scale=0.07)} for _ in range(2))
    OPS["cast"](expected["out"], x)
    device = Device()
    device.call("cast", got, {"x": x})
    for right, found in zip(expected["out"].tensors, got["out"].tensors, strict=True):
        assert device.host(found.array).tobytes() == right.array.tobytes(), found.form


@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
@EVERY
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_form_of_what_is_held(shape, form, parts, forms):
    for dtype in ("bf16", "fp32") if forms == (None,) else ("bf16",):
        check(held(shape, form, parts), dtype, forms)


@EVERY
@pytest.mark.parametrize("shape", SHAPES[:1], ids=str)
def test_every_byte_is_decoded(shape, form, parts):
    """All numbers, those that no weight has among them, under scales of every kind."""
    x = held(shape, form, parts)
    x.array[...] = np.resize(np.arange(256, dtype=np.uint8), x.array.shape).view(x.array.dtype)
    if form.dtype == "mxfp4":
        x.scale[...] = np.resize(np.arange(256, dtype=np.uint8), x.scale.shape)
    expected, got = output(x.shape, "fp32"), {"out": output(x.shape, "fp32")}
    with np.errstate(over="ignore"):
        OPS["cast"](expected, x)
    device = Device()
    device.call("cast", got, {"x": x})
    found = device.host(got["out"].tensors[0].array)
    np.testing.assert_array_equal(found, expected.tensors[0].array)
