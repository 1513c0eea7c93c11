"""Copies with scales of their own on the GPU: every byte and every scale equals the reference's."""

import numpy as np
import pytest

from llmq.tensor import LARGEST, Form

from .build import output, tensor
from .cases import OWN_SCALES
from .cuda_build import Device
from .test_quantize import uneven

pytestmark = pytest.mark.gpu(emulated="[(304, 896)]")
# rows that no 16 divides, accesses of 4 numbers, ragged tiles, rows of several warps and ones that are read twice
SHAPES = [(37, 88), (3, 43, 76), (304, 896), (2, 197, 1160), (257, 4864), (5, 37888), (9, 151936)]


def copies(dtype, *scalings, layouts=("row", "col")):
    """Forms of one fp8 format."""
    return tuple(Form(dtype, layout, scaling) for scaling in scalings for layout in layouts)


def both(x, forms, source, dtype, *, scale=True):
    """The outputs of the reference and of the GPU."""
    from llmq.ops.reference import OPS

    limit = LARGEST[forms[0].dtype] if forms else 448.0
    inputs = {"x": tensor(x, source)}
    outputs = [
        {"out": output(x.shape, dtype, forms), "scale": output((1,), "fp32", (None,) if scale else ())}
        for _ in range(2)
    ]
    with np.errstate(invalid="ignore"):
        OPS["quantize"](*outputs[0].values(), inputs["x"], limit=limit)
    device = Device()
    device.call("quantize", outputs[1], inputs, limit=limit)
    return outputs[0], outputs[1], device


def check(x, forms, source="bf16", dtype="bf16", *, scale=True):
    """Asserts that bytes and scales, what pads scales included, are equal."""
    expected, got, device = both(x, forms, source, dtype, scale=scale)
    for right, found in zip(expected["out"].tensors, got["out"].tensors, strict=True):
        scales = device.host(found.scale)
        assert scales.tobytes() == right.scale.tobytes(), f"{right.form.key}: {np.sum(scales != right.scale)} scales"
        stored = device.host(found.array)
        nan = [np.isnan(array.astype(np.float32)) for array in (stored, right.array)]  # of which e5m2 has many bytes
        differ = (stored.view(np.uint8) != right.array.view(np.uint8)) & ~(nan[0] & nan[1])
        assert not differ.any(), f"{right.form.key}: {np.count_nonzero(differ)} of {stored.size} bytes"
    for right, found in zip(expected["scale"].tensors, got["scale"].tensors, strict=True):
        assert device.host(found.array) == right.array


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_equal_the_reference(shape):
    """Both layouts of every scaling at once."""
    check(uneven(shape), copies("e4m3", *OWN_SCALES))


@pytest.mark.parametrize("shape", [(304, 896), (130, 208), (1152, 640), (7, 176)], ids=str)
def test_rows_with_scales_of_tiles_become_columns_with_theirs(shape):
    """Byte by byte, with what pads the scales."""
    from llmq.ops.reference import OPS

    rows = output(shape, "bf16", (Form("e4m3", "row", "tilewise"),))
    OPS["quantize"](rows, output((1,), "fp32", ()), tensor(uneven(shape), "bf16"), limit=448.0)
    expected, got = ({"out": output(shape, "bf16", (Form("e4m3", "col", "tilewise"),))} for _ in range(2))
    OPS["cast"](expected["out"], rows.tensors[0])
    device = Device()
    device.call("cast", got, {"x": rows.tensors[0]})
    (right,), (found,) = expected["out"].tensors, got["out"].tensors
    assert device.host(found.scale).tobytes() == right.scale.tobytes()
    assert device.host(found.array).tobytes() == right.array.tobytes()


@pytest.mark.parametrize("dtypes", ["bf16 bf16", "fp32 bf16", "fp32 fp32"])
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_copies_of_other_dtypes_equal_the_reference(shape, dtypes):
    """In e5m2, and of f32 that is or is not rounded to bf16 first."""
    check(uneven(shape), copies("e5m2", *OWN_SCALES), *dtypes.split())


@pytest.mark.parametrize("form", copies("e4m3", *OWN_SCALES), ids=lambda form: form.key)
def test_a_copy_alone_equals_the_reference(form):
    """Without the others, with and without the scale of the whole."""
    check(uneven((304, 896)), (form,), scale=False)
    check(uneven((304, 896)), (form,))


def test_the_scale_of_the_whole_alone():
    check(uneven((304, 896)), ())


@pytest.mark.parametrize("broken", [0.0, np.nan, np.inf, 1e-38])
def test_without_a_finite_maximum_a_scale_is_1(broken):
    x = uneven((260, 520))
    x[128:256, 128:256] = broken
    x[3], x[:, 5] = broken, broken
    for values in (x, np.full_like(x, broken)):
        check(values, copies("e4m3", *OWN_SCALES))
        check(values, copies("e5m2", *OWN_SCALES), "fp32", "fp32")


@pytest.mark.parametrize("form", copies("e4m3", *OWN_SCALES, layouts=("row",)), ids=lambda form: form.key)
@pytest.mark.parametrize("shape", [(300, 600), (3, 43, 88)], ids=str)
def test_errors_of_copies_are_measured_by_their_scales(shape, form):
    """Counts are equal; sums of f32 in another order agree to a thousand roundings."""
    from llmq.ops.reference import OPS

    x = uneven(shape)
    inputs = {"error": tensor(np.ones(6), "fp32"), "x": tensor(x, "bf16"), "copy": tensor(x, None, form)}
    expected, got = ({"new_error": output((6,), "fp32")} for _ in range(2))
    OPS["quantization_error"](*expected.values(), *inputs.values())
    device = Device()
    device.call("quantization_error", got, inputs)
    right = expected["new_error"].tensors[0].array
    found = device.host(got["new_error"].tensors[0].array)
    np.testing.assert_allclose(found, right, rtol=1000 * 2.0**-24)
    np.testing.assert_array_equal(found[[0, 3, 4, 5]], right[[0, 3, 4, 5]])


def test_an_odd_width_is_refused_with_the_way_out():
    from llmq.errors import UsageError

    with pytest.raises(UsageError, match=r"90 wide.*multiple of 16: use --matmul-dtype bf16"):
        both(uneven((8, 90)), copies("e4m3", "blockwise"), "bf16", "bf16")


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
