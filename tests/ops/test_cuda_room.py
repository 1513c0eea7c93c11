"""What passes through the GPU's arena while a model is loaded: the bytes that the host makes, slice by slice."""

from types import SimpleNamespace

import numpy as np
import pytest

from llmq.backends import cuda_room
from llmq.model import held
from llmq.model.held import HELD_FORMS, HostRoom, Repeated, hold, room_bytes, single_scale
from llmq.operands import Tensor
from llmq.row import Part, Row
from llmq.tensor import DTYPES, Form, Ref, scale_shape, stored_shape

from .cuda_build import Device

pytestmark = pytest.mark.gpu(emulated="192")
STREAM = SimpleNamespace(ptr=0, synchronize=lambda: None)
SIZES = pytest.mark.parametrize("width", [192, 1024])
ROWS = 650


@pytest.fixture
def rooms(monkeypatch):
    """Makes a room of an arena that is as large as the plan makes it, on the current stream."""
    import cupy

    def made(num_bytes):
        arena = cupy.full(num_bytes, 0xFF, np.uint8)

        def view(home, offset, shape, dtype):
            size = int(np.prod(shape)) * dtype.itemsize
            assert home == "device" and offset >= 0 and offset + size <= num_bytes
            return arena[offset : offset + size].view(dtype).reshape(shape)

        return cuda_room.DeviceRoom(view, 0, num_bytes, STREAM)

    monkeypatch.setattr(held, "SLICE_BYTES", 2**18)
    return made


def row_of(width):
    """Two tensors as one row."""
    parts = (Part("gate", 0, 450), Part("up", 450, ROWS))
    return Row("w", (ROWS, width), parts, "normal", decay=True, layer=0, site="w")


def empty(shape, form):
    """A held copy without values."""
    numbers = np.full(stored_shape(shape, form), 0, DTYPES[form.dtype])
    return Tensor("w", numbers, shape, form, np.zeros(scale_shape(shape, form), DTYPES[form.scales.dtype]))


def values_of(width, source):
    """A weight, in the dtype of a file or as it repeats itself."""
    if source.startswith("repeated"):
        block = np.random.default_rng(0).standard_normal(10_007).astype(np.float32)
        return Repeated(block.astype(DTYPES["bf16"]) if "bf16" in source else block, (ROWS, width), ROWS, 77)
    value = np.random.default_rng(0).standard_normal((ROWS, width)) * np.random.default_rng(1).random((ROWS, 1)) ** 3
    return value.astype(DTYPES[source])


@pytest.mark.parametrize("source", ["bf16", "fp32", "fp16", "repeated"])
@pytest.mark.parametrize("base", [*HELD_FORMS, "e4m3 single", "masters"])
@SIZES
def test_copies_are_those_of_the_host(rooms, width, base, source):
    """Also those of trained weights without masters; with the scales of fp8 that is made of them."""
    row, dtype, values = row_of(width), "bf16", values_of(width, source)
    form = Form("e4m3", "row", "powers")
    if base != "masters":
        form = HELD_FORMS[base.split()[0]](row, "single" in base)
    borders = tuple(part.stop for part in row.parts)
    right, device = empty(row.shape, form), Device()
    copy = empty(row.shape, form)
    there = device.tensor(copy)
    room = rooms(room_bytes(Ref("w", "weight", row.shape, dtype, form=form)))
    assert room.rows_at_once(width) < ROWS, "several slices"
    hold(HostRoom(), right, dtype, values, borders)
    hold(room, there, dtype, values, borders)
    assert device.host(copy.scale).tobytes() == right.scale.tobytes()
    assert device.host(copy.array).tobytes() == right.array.tobytes()
    if form.dtype == "e4m3":
        return
    scale = np.zeros(1, np.float32)
    found = device.array(scale)
    single_scale(room, found, there, dtype, "e4m3")
    single_scale(HostRoom(), scale, right, dtype, "e4m3")
    assert device.host(scale)[0] == scale[0] > 0


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("fp32", "bf16"),
        ("bf16", "fp32"),
        *(("repeated", kind) for kind in ("bf16", "fp32")),
        *(("repeated in bf16", kind) for kind in ("bf16", "fp32")),
    ],
)
@SIZES
def test_plain_weights_are_rounded_and_repeated_as_on_the_host(rooms, width, source, kind):
    values, device = values_of(width, source), Device()
    if source.startswith("repeated"):
        values = Repeated(values.block, values.shape, 600, values.first)
        assert not np.asarray(values)[600:].any() and np.asarray(values)[:600].all()
    target = np.zeros(values.shape, DTYPES[kind])
    array = device.array(target)
    assert rooms(2**21).set(array, values) == (source != kind)
    if source == kind:
        return
    assert device.host(target).tobytes() == np.asarray(values).astype(DTYPES[kind]).tobytes()


@SIZES
def test_what_has_no_room_or_no_kernel_is_left_to_the_host(rooms, width):
    device, values = Device(), values_of(width, "fp32")
    arrays = {kind: device.array(np.zeros(values.shape, DTYPES[kind])) for kind in ("bf16", "fp32", "fp16")}
    room = rooms(2**21)
    assert room.set(arrays["bf16"], values)
    assert not room.set(arrays["fp32"], values) and not room.set(arrays["fp16"], values)
    assert not room.set(arrays["bf16"], values[:1]) and not room.set(arrays["bf16"], values.astype(np.float64))
    assert not rooms(2**12).set(arrays["bf16"], values)
    assert not rooms(2**12).set(arrays["bf16"], values_of(width, "repeated"))


def test_a_part_of_what_repeats_is_that_of_the_whole():
    """Of matrices and vectors, with rows of zeros."""
    block = np.arange(1, 12, dtype=np.float32)
    for shape in ((7, 3), (20,)):
        whole = Repeated(block, shape, 5, first=4)
        value = np.asarray(whole)
        assert value.reshape(-1)[0] == 5 and not value[5:].any() and value[:5].all()
        for start, stop in ((0, 2), (3, 7), (5, 7)):
            np.testing.assert_array_equal(np.asarray(whole[start:stop]), value[start:stop])
