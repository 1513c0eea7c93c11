"""Copies between homes: every byte and owned scale arrives, in every form; on the GPU to pinned memory and back."""

from dataclasses import replace

import numpy as np
import pytest

from llmq.operands import Tensor
from llmq.ops.reference import OPS
from llmq.tensor import Form

from .build import output, poisoned, tensor
from .cases import OWN_SCALES

FORMS = [None, Form("bf16", "col"), *(Form("e4m3", layout, "delayed") for layout in ("row", "col"))]
FORMS += [Form("e4m3", layout, scaling) for scaling in OWN_SCALES for layout in ("row", "col")]
EVERY_FORM = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.key if form else "value")
BOTH = pytest.mark.parametrize("op", ["copy_to_host", "copy_to_device"])
SHAPE = (3, 43, 76)


def source_of(form):
    x = np.random.default_rng(3).standard_normal(SHAPE)
    return tensor(x, None if form else "bf16", form, 0.01 if form and form.scaling == "delayed" else None)


def check(got, x):
    assert got.array.tobytes() == x.array.tobytes()
    if x.form is not None and x.form.owns_scales:
        assert got.scale.tobytes() == x.scale.tobytes()


@BOTH
@EVERY_FORM
def test_every_byte_is_copied_and_every_owned_scale(op, form):
    x, out = source_of(form), output(SHAPE, "bf16", (form,), scale=7.0)
    OPS[op](out, x)
    check(out.tensors[0], x)
    if form is not None and form.scaling == "delayed":
        assert out.tensors[0].scale == 7, "a scale that others share is not the copy's"


@BOTH
def test_bits_that_are_no_number_are_copied(op):
    x = Tensor("x", poisoned((5, 3), "bf16"), (5, 3))
    out = output((5, 3), "bf16", start=np.zeros((5, 3)))
    out.accumulate = False
    OPS[op](out, x)
    assert out.tensors[0].array.tobytes() == b"\xff" * 30


@BOTH
def test_another_form_shape_or_dtype_is_no_copy(op):
    x = source_of(None)
    for wrong in (output(SHAPE, "fp32"), output((3, 43, 75), "bf16"), output(SHAPE, "bf16", (FORMS[1],))):
        with pytest.raises(AssertionError, match="no plain copy"):
            OPS[op](wrong, x)
    with pytest.raises(AssertionError, match="no plain copy"):
        OPS[op](output(SHAPE, "bf16", start=np.zeros(SHAPE)), x)


@pytest.mark.gpu
@EVERY_FORM
def test_the_gpu_copies_to_pinned_memory_and_back(form):
    """In a captured graph, on a stream of its own: the bytes of the host when it runs are those that arrive."""
    import cupy

    from llmq.ops import cuda

    from .cuda_build import Device

    def pinned(array):
        memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(array.nbytes), np.uint8, array.nbytes)
        memory[...] = 0xFF
        return memory.view(array.dtype).reshape(array.shape)

    def on_host(like):
        owns = form is not None and form.owns_scales
        scale = pinned(like.scale) if owns else like.scale
        return replace(like, array=pinned(like.array), scale=scale)

    device, x = Device(), source_of(form)
    away, back = on_host(x), output(SHAPE, "bf16", (form,), scale=7.0)
    given, returned = device.tensor(x), device.output(back)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        cuda.OPS["copy_to_host"](replace(returned, tensors=(away,)), given)
        cuda.OPS["copy_to_device"](returned, away)
        graph = stream.end_capture()
        assert away.array.tobytes() == b"\xff" * away.array.nbytes, "a capture runs nothing"
        graph.launch(stream)
        stream.synchronize()
    check(away, x)
    arrived = back.tensors[0]
    scale = device.host(arrived.scale) if form is not None and form.owns_scales else None
    check(replace(arrived, array=device.host(arrived.array), scale=scale), x)
