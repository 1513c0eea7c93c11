"""What fp8 rows of a frozen weight stand for, and their transpose, on the GPU: byte by byte as on the CPU."""

import numpy as np
import pytest

from llmq.tensor import Form

from .build import output, tensor
from .cuda_build import Device
from .test_quantize import uneven

pytestmark = pytest.mark.gpu(emulated="(260, 520)")
SHAPES = [(37, 88), (260, 520), (130, 6), (131, 1028), (3, 5000), (4864, 896)]
SINGLE, TILES = Form("e4m3", "row", "current"), Form("e4m3", "row", "tilewise")
POWERS = Form("e4m3", "row", "powers")


def check(x, form, dtype):
    """Both ops on both backends."""
    from llmq.ops.reference import OPS

    expected, got = ({"out": output(x.shape, dtype, (form,), scale=0.01)} for _ in range(2))
    OPS["cast"](expected["out"], x)
    device = Device()
    device.call("cast", got, {"x": x})
    right, found = (one["out"].tensors[0] for one in (expected, got))
    assert device.host(found.array).tobytes() == right.array.tobytes()
    if form is not None and form.owns_scales:
        assert device.host(found.scale).tobytes() == right.scale.tobytes()


@pytest.mark.parametrize("form", [SINGLE, TILES, POWERS], ids=lambda form: form.scaling)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_value_of_fp8_rows(shape, form):
    x = tensor(uneven(shape), None, form, 0.013)
    for dtype in ("bf16", "fp32"):
        check(x, None, dtype)


def test_every_byte_is_decoded():
    """Subnormals, both zeros and the two NaN among them; all payloads of a NaN are one."""
    x = tensor(np.zeros((16, 16)), None, SINGLE, 0.013)
    x.array[...] = np.arange(256, dtype=np.uint8).view(x.array.dtype).reshape(16, 16)
    outputs = {"out": output((16, 16), "fp32")}
    device = Device()
    device.call("cast", outputs, {"x": x})
    np.testing.assert_array_equal(device.host(outputs["out"].tensors[0].array), x.read())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_turn_with_their_scales(shape):
    check(tensor(uneven(shape), None, TILES), Form("e4m3", "col", "tilewise"), "bf16")
