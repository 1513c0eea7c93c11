"""What frozen weights are held in, made on the GPU: every byte and every scale equals the reference's."""

from dataclasses import replace

import numpy as np
import pytest

from llmq.few_bits import NF4_BLOCK
from llmq.ops.reference import OPS
from llmq.scaling import Nested
from llmq.tensor import LIMITS, Form

from .build import output, tensor
from .cuda_build import Device
from .test_cuda_unpack import HELD, held
from .test_quantize import uneven

pytestmark = pytest.mark.gpu(emulated="(66, 128)")
FORMS = {
    "int8": Form("int8", "row", "rowwise"),
    "nf4": Form("nf4", "row", "absmax"),
    "mxfp4": Form("mxfp4", "row", "exponents"),
    "powers": Form("e4m3", "row", "powers"),
}
EVERY = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
SHAPES = [(66, 128), (64, 44), (5, 4864), (320, 520), (1024, 896)]


def poisoned(shape, dtype, form):
    """An output with scales of the form's own dtype."""
    made = output(shape, dtype, (form,))
    (copy,) = made.tensors
    scale = np.full(form.scales.shape(int(np.prod(shape[:-1])), shape[-1]), 0xFF, np.uint8)
    kind = np.uint8 if form.scales.dtype == "uint8" else np.float32
    return replace(made, tensors=(replace(copy, scale=scale.astype(kind)),))


def check(value, form, source="bf16", dtype="bf16"):
    """Asserts that numbers and scales are equal, but for the bytes of NaN."""
    x, limit = tensor(value, source), LIMITS[form.dtype]
    outputs = [{"out": poisoned(value.shape, dtype, form), "scale": output((1,), "fp32", ())} for _ in range(2)]
    with np.errstate(invalid="ignore", over="ignore"):
        OPS["quantize"](*outputs[0].values(), x, limit=limit)
    device = Device()
    device.call("quantize", outputs[1], {"x": x}, limit=limit)
    (right,), (found,) = (one["out"].tensors for one in outputs)
    np.testing.assert_array_equal(device.host(found.scale), right.scale)
    numbers, expected = device.host(found.array).view(np.uint8), right.array.view(np.uint8)
    broken = np.isnan(value).reshape(*numbers.shape, -1).any(axis=-1)
    differ = (numbers != expected) & ~broken
    assert not differ.any(), f"{np.count_nonzero(differ)} of {numbers.size} bytes"


@EVERY
@pytest.mark.parametrize("dtypes", ["bf16 bf16", "fp32 bf16", "fp32 fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copies_equal_the_reference(shape, dtypes, form):
    """Blocks that end in a row and that go across rows; rows of zeros."""
    value = uneven(shape)
    value[:: max(1, shape[0] // 5)] = 0
    check(value, form, *dtypes.split())


@pytest.mark.parametrize("shape", [(66, 128), (9, 70)], ids=str)
def test_halves_go_where_the_reference_takes_them(shape):
    """Multiples of an eighth of the scale, many of which are halfway between two numbers of e2m1."""
    value = np.random.default_rng(0).integers(-48, 49, shape) / 8.0
    value[:, ::32] = 6
    check(value, FORMS["mxfp4"])


@EVERY
@pytest.mark.parametrize("broken", [0.0, -0.0, np.nan, -np.nan, np.inf, 1e-38, 1e-39, 1e-44, 3e38])
@pytest.mark.parametrize("shape", SHAPES[:1], ids=str)
def test_what_no_weight_has_is_stored_as_by_the_reference(shape, broken, form):
    for seed, dtypes in enumerate(("bf16 bf16", "fp32 fp32")):
        value = uneven(shape, seed).astype(np.float32)
        value[3], value[:, 5], value[8, 40:] = broken, broken, -broken
        check(value, form, *dtypes.split())
        check(np.full_like(value, broken), form, *dtypes.split())


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
    right, found = ({"out": output(shape, "uint8")} for _ in range(2))
    with np.errstate(invalid="ignore"):
        OPS["nest"](right["out"], tensor(absmax, "fp32"), **numbers)
    device = Device()
    device.call("nest", found, {"absmax": tensor(absmax, "fp32")}, **numbers)
    got, expected = device.host(found["out"].tensors[0].array), right["out"].tensors[0].array
    codes = shape[0] - sum(counts)
    np.testing.assert_array_equal(got[:codes].view(np.float32), expected[:codes].view(np.float32))
    np.testing.assert_array_equal(got[codes:], expected[codes:])


@pytest.mark.parametrize("in_bf16", [False, True])
@pytest.mark.parametrize("source", ["fp32", "bf16", *HELD])
@pytest.mark.parametrize("shape", [(66, 128), (320, 520)], ids=str)
def test_the_largest_magnitude_of_what_is_held(shape, source, in_bf16):
    for seed in range(3):
        x = held(shape, *HELD[source], seed) if source in HELD else tensor(uneven(shape, seed), source)
        right, found = ({"out": output((1,), "fp32")} for _ in range(2))
        OPS["amax"](right["out"], x, in_bf16=in_bf16)
        device = Device()
        device.call("amax", found, {"x": x}, in_bf16=in_bf16)
        assert device.host(found["out"].tensors[0].array) == right["out"].tensors[0].array > 0
