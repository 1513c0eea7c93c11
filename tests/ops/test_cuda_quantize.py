"""Copies with scales of their own, and what these stand for, on the GPU: every byte and scale is the reference's."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from llmq.errors import UsageError
from llmq.few_bits import NF4_BLOCK
from llmq.model.held import held_copy
from llmq.operands import Output, Tensor
from llmq.scaling import Nested
from llmq.tensor import LARGEST, LIMITS, Form, Ref

from .build import output, tensor
from .cases import OWN_SCALES
from .cuda_build import Device, on_both
from .test_quantize import uneven

gpu = pytest.mark.gpu(emulated="[(304, 896)]")
of_packed = pytest.mark.gpu(emulated="(66, 128)")
of_rows = pytest.mark.gpu(emulated="(260, 520)")
# rows that no 16 divides, accesses of 4 numbers, ragged tiles, rows of several warps and ones that are read twice
SHAPES = [(37, 88), (3, 43, 76), (304, 896), (2, 197, 1160), (257, 4864), (5, 37888), (9, 151936)]
PACKED_SHAPES = [(66, 128), (64, 44), (5, 4864), (320, 520), (1024, 896)]
HELD_SHAPES = [(66, 128), (128, 6), (64, 44), (320, 520), (1024, 896)]
ROW_SHAPES = [(37, 88), (260, 520), (130, 6), (131, 1028), (3, 5000), (4864, 896)]
SINGLE, TILES, POWERS = (Form("e4m3", "row", scaling) for scaling in ("current", "tilewise", "powers"))
INT8, NF4, MXFP4 = Form("int8", "row", "rowwise"), Form("nf4", "row", "nested256"), Form("mxfp4", "row", "exponents")
PACKED = {"int8": INT8, "nf4": Form("nf4", "row", "absmax"), "mxfp4": MXFP4, "powers": POWERS}
EVERY_PACKED = pytest.mark.parametrize("form", PACKED.values(), ids=PACKED)
HELD = {"int8": (INT8, 1), "nf4": (NF4, 1), "nf4 in halves": (NF4, 2), "mxfp4": (MXFP4, 1)}
EVERY_HELD = pytest.mark.parametrize(("form", "parts"), HELD.values(), ids=HELD)
ROW, COL = (Form("e4m3", layout, "current") for layout in ("row", "col"))
FORMS = {"value": (None,), "rows": (ROW,), "columns": (COL,), "both": (ROW, COL)}


def copies(dtype, *scalings, layouts=("row", "col")):
    """Forms of one fp8 format."""
    return tuple(Form(dtype, layout, scaling) for scaling in scalings for layout in layouts)


def made(shape, dtype, forms):
    """An output with scales of each form's own dtype."""
    found = output(shape, dtype, forms)
    for copy in found.tensors:
        if copy.form.scales.dtype == "uint8":
            copy.scale = np.full(copy.form.scales.shape(int(np.prod(shape[:-1])), shape[-1]), 0xFF, np.uint8)
    return found


def check(x, forms, source="bf16", dtype="bf16", *, scale=True):
    """Asserts that bytes and scales, what pads scales included, are equal, but for the bytes of NaN."""
    outputs = {"out": made(x.shape, dtype, forms), "scale": output((1,), "fp32", (None,) if scale else ())}
    limit = LIMITS[forms[0].dtype] if forms else 448.0
    for right, found in on_both("quantize", outputs, {"x": tensor(x, source)}, limit=limit):
        if right.form is None:
            assert found.array == right.array
            continue
        np.testing.assert_array_equal(found.scale, right.scale, right.form.key)
        stored, expected = found.array.view(np.uint8), right.array.view(np.uint8)
        if right.form.dtype in LARGEST:  # e5m2 has many NaN, the scales have none
            assert found.scale.tobytes() == right.scale.tobytes(), right.form.key
            broken = np.isnan(found.array.astype(np.float32)) & np.isnan(right.array.astype(np.float32))
        else:
            broken = np.isnan(x).reshape(*stored.shape, -1).any(axis=-1)
        differ = (stored != expected) & ~broken
        assert not differ.any(), f"{right.form.key}: {np.count_nonzero(differ)} of {stored.size} bytes"


def check_cast(x, forms, dtype, scale=0.01):
    """Asserts that all forms of what x means are equal."""
    for right, found in on_both("cast", {"out": output(x.shape, dtype, forms, scale=scale)}, {"x": x}):
        assert found.array.tobytes() == right.array.tobytes(), found.form
        if right.form is not None and right.form.owns_scales:
            assert found.scale.tobytes() == right.scale.tobytes()


def held(shape, form, parts, seed=0):
    """A weight with rows of every magnitude, some of them zero, in `form`; NF4 of one tensor, or of two halves."""
    value = uneven(shape, seed)
    value[:: max(1, shape[0] // 5)] = 0
    borders = [shape[0] * (part + 1) // parts for part in range(parts)]
    if parts > 1:
        form = replace(form, scaling=f"nested{math.gcd(256, borders[0] * shape[1] // 64)}")
    numbers, scale = held_copy(Ref("w", "weight", shape, "bf16", form=form), value, borders)
    return Tensor("w", numbers, shape, form, scale)


EVERY_COPY = copies("e4m3", *OWN_SCALES)


@gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_equal_the_reference(shape):
    """Both layouts of every scaling at once; in e5m2, and of f32 that is or is not rounded to bf16 first; one without
    the others, with and without the scale of the whole; and that scale alone."""
    check(uneven(shape), EVERY_COPY)
    if shape in SHAPES[1:3]:
        for dtypes in (("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32")):
            check(uneven(shape), copies("e5m2", *OWN_SCALES), *dtypes)
    if shape == (304, 896):
        check(uneven(shape), ())
        for form, scale in product(EVERY_COPY, (True, False)):
            check(uneven(shape), (form,), scale=scale)


@gpu
@pytest.mark.parametrize("shape", [(304, 896), (130, 208), (1152, 640), (7, 176), *ROW_SHAPES], ids=str)
def test_rows_with_scales_of_tiles_become_columns_with_theirs(shape):
    """Byte by byte, with what pads the scales."""
    check_cast(tensor(uneven(shape), "bf16", TILES), (Form("e4m3", "col", "tilewise"),), "bf16")


@gpu
@pytest.mark.parametrize("broken", [0.0, np.nan, np.inf, 1e-38])
def test_without_a_finite_maximum_a_scale_is_1(broken):
    x = uneven((260, 520))
    x[128:256, 128:256] = broken
    x[3], x[:, 5] = broken, broken
    for values in (x, np.full_like(x, broken)):
        check(values, copies("e4m3", *OWN_SCALES))
        check(values, copies("e5m2", *OWN_SCALES), "fp32", "fp32")


@gpu
@pytest.mark.parametrize("form", copies("e4m3", *OWN_SCALES, layouts=("row",)), ids=lambda form: form.key)
@pytest.mark.parametrize("shape", [(300, 600), (3, 43, 88)], ids=str)
def test_errors_of_copies_are_measured_by_their_scales(shape, form):
    """Counts are equal; sums of f32 in another order agree to a thousand roundings."""
    x = uneven(shape)
    inputs = {"error": tensor(np.ones(6), "fp32"), "x": tensor(x, "bf16"), "copy": tensor(x, None, form)}
    ((right, found),) = on_both("quantization_error", {"new_error": output((6,), "fp32")}, inputs)
    np.testing.assert_allclose(found.array, right.array, rtol=1000 * 2.0**-24)
    np.testing.assert_array_equal(found.array[[0, 3, 4, 5]], right.array[[0, 3, 4, 5]])


@gpu
def test_an_odd_width_is_refused_with_the_way_out():
    with pytest.raises(UsageError, match=r"90 wide.*multiple of 16: use --matmul-dtype bf16"):
        check(uneven((8, 90)), copies("e4m3", "blockwise"))


@pytest.mark.gpu
def test_scales_are_found_on_two_streams_at_once():
    """As weights that are gathered are quantized beside activations."""
    from llmq.ops.cuda.quantize import amax_scale

    cupy, device = pytest.importorskip("cupy"), Device()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    values = [tensor(np.full(1 << 22, value), "bf16") for value in (1.0, 448.0)]
    scales = [[output((1,), "fp32") for _ in range(200)] for _ in streams]
    calls = [
        [(device.output(scale), device.tensor(value)) for scale in each]
        for each, value in zip(scales, values, strict=True)
    ]
    cupy.cuda.get_current_stream().synchronize()
    for both_calls in zip(*calls, strict=True):
        for stream, (scale, value) in zip(streams, both_calls, strict=True):
            with stream:
                amax_scale(scale, value, limit=448.0)
    for stream, each, right in zip(streams, scales, (1 / 448, 1.0), strict=True):
        stream.synchronize()
        found = [device.host(scale.tensors[0].array)[0] for scale in each]
        assert found == [np.float32(right)] * len(each)


@of_packed
@EVERY_PACKED
@pytest.mark.parametrize("dtypes", ["bf16 bf16", "fp32 bf16", "fp32 fp32"])
@pytest.mark.parametrize("shape", PACKED_SHAPES, ids=str)
def test_what_weights_are_held_in_equals_the_reference(shape, dtypes, form):
    """Blocks that end in a row and that go across rows; rows of zeros."""
    value = uneven(shape)
    value[:: max(1, shape[0] // 5)] = 0
    check(value, (form,), *dtypes.split(), scale=False)


@of_packed
@pytest.mark.parametrize("shape", [(66, 128), (9, 70)], ids=str)
def test_halves_go_where_the_reference_takes_them(shape):
    """Multiples of an eighth of the scale, many of which are halfway between two numbers of e2m1."""
    value = np.random.default_rng(0).integers(-48, 49, shape) / 8.0
    value[:, ::32] = 6
    check(value, (MXFP4,), scale=False)


@of_packed
@EVERY_PACKED
@pytest.mark.parametrize("broken", [0.0, -0.0, np.nan, -np.nan, np.inf, 1e-38, 1e-39, 1e-44, 3e38])
@pytest.mark.parametrize("shape", PACKED_SHAPES[:1], ids=str)
def test_what_no_weight_has_is_stored_as_by_the_reference(shape, broken, form):
    for seed, dtypes in enumerate(("bf16 bf16", "fp32 fp32")):
        value = uneven(shape, seed).astype(np.float32)
        value[3], value[:, 5], value[8, 40:] = broken, broken, -broken
        check(value, (form,), *dtypes.split(), scale=False)
        check(np.full_like(value, broken), (form,), *dtypes.split(), scale=False)


@of_packed
@pytest.mark.parametrize("broken", [None, 0.0, np.nan, np.inf])
@pytest.mark.parametrize(
    ("group", "counts"),
    [(256, (300,)), (256, (1,)), (4, (300, 20)), (32, (512, 96, 33)), (1, (5, 7)), (256, (4864, 100_001))],
    ids=lambda one: f"{one} (66, 128)",
)
def test_scales_of_scales_equal_the_reference(group, counts, broken):
    """Of one tensor and of several, which share no mean and no 256 scales."""
    absmax = np.abs(np.random.default_rng(0).standard_normal(sum(counts))).astype(np.float32) ** 3
    if broken is not None:
        absmax[: counts[0] // 2 + 1] = broken
    numbers = {"group": group, "borders": tuple(int(stop) for stop in np.cumsum(counts))}
    shape = Nested(group).shape(sum(counts), NF4_BLOCK)
    written = {"out": output(shape, "uint8")}
    ((right, found),) = on_both("nest", written, {"absmax": tensor(absmax, "fp32")}, **numbers)
    codes = shape[0] - sum(counts)
    np.testing.assert_array_equal(found.array[:codes].view(np.float32), right.array[:codes].view(np.float32))
    np.testing.assert_array_equal(found.array[codes:], right.array[codes:])


@of_packed
@pytest.mark.parametrize("in_bf16", [False, True])
@pytest.mark.parametrize("source", ["fp32", "bf16", *HELD])
@pytest.mark.parametrize("shape", [(66, 128), (320, 520)], ids=str)
def test_the_largest_magnitude_of_what_is_held(shape, source, in_bf16):
    for seed in range(3):
        x = held(shape, *HELD[source], seed) if source in HELD else tensor(uneven(shape, seed), source)
        ((right, found),) = on_both("amax", {"out": output((1,), "fp32")}, {"x": x}, in_bf16=in_bf16)
        assert found.array == right.array > 0


@of_packed
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
@EVERY_HELD
@pytest.mark.parametrize("shape", HELD_SHAPES, ids=str)
def test_every_form_of_what_is_held(shape, form, parts, forms):
    for dtype in ("bf16", "fp32") if forms == (None,) else ("bf16",):
        check_cast(held(shape, form, parts), forms, dtype, scale=0.07)


@of_packed
@EVERY_HELD
@pytest.mark.parametrize("shape", HELD_SHAPES[:1], ids=str)
def test_every_byte_of_what_is_held_is_decoded(shape, form, parts):
    """All numbers, those that no weight has among them, under scales of every kind."""
    x = held(shape, form, parts)
    x.array[...] = np.resize(np.arange(256, dtype=np.uint8), x.array.shape).view(x.array.dtype)
    if form.dtype == "mxfp4":
        x.scale[...] = np.resize(np.arange(256, dtype=np.uint8), x.scale.shape)
    ((right, found),) = on_both("cast", {"out": output(x.shape, "fp32")}, {"x": x})
    np.testing.assert_array_equal(found.array, right.array)


@of_rows
@pytest.mark.parametrize("form", [SINGLE, TILES, POWERS], ids=lambda form: form.scaling)
@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_the_value_of_fp8_rows(shape, form):
    x = tensor(uneven(shape), None, form, 0.013)
    for dtype in ("bf16", "fp32"):
        check_cast(x, (None,), dtype)


@of_rows
def test_every_byte_of_fp8_rows_is_decoded():
    """Subnormals, both zeros and the two NaN among them; all payloads of a NaN are one."""
    x = tensor(np.zeros((16, 16)), None, SINGLE, 0.013)
    x.array[...] = np.arange(256, dtype=np.uint8).view(x.array.dtype).reshape(16, 16)
    ((_, found),) = on_both("cast", {"out": output((16, 16), "fp32")}, {"x": x})
    np.testing.assert_array_equal(found.array, x.read())


@pytest.mark.gpu(emulated="300-896")
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("rows", "columns"), [(300, 896), (128, 16), (1, 4864), (896, 1168)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_compressed_pieces_are_added_by_the_scales_of_their_tiles(rows, columns, dtype, rank, accumulate):
    """Of what ranks have sent. Rows that fill up the last tiles are read by nothing: they are NaN."""
    places = -(-rows // 128) * 128
    values = np.full((2, places, columns), np.nan, np.float32)
    values[:, :rows] = uneven((2 * rows, columns)).reshape(2, rows, columns)
    (pieces,) = output(values.shape, "fp32", (TILES,)).tensors
    for place in range(2):
        part = pieces.chunk(place * places, rows)
        Output("piece", part.shape, "fp32", (part,)).write(values[place, :rows])
        pieces.array[place, rows:] = np.nan
    start = np.ones((rows, columns)) if accumulate else None
    inputs = {"own": tensor(uneven((rows, columns)), dtype), "pieces": pieces}
    ((right, found),) = on_both("sum_pieces", {"out": output((rows, columns), dtype, start=start)}, inputs, rank=rank)
    assert np.isfinite(right.array.astype(np.float32)).all()
    assert right.array.tobytes() == found.array.tobytes()
