"""Handles: pieces of a tensor, and the scales that belong to them."""

import numpy as np
import pytest

from llmq.operands import Tensor, own_scales, scales_of_columns, to_form
from llmq.scaling import SCALINGS
from llmq.tensor import Form, Origin, Ref, View, stored_shape

QKV = Ref("qkv", "activation", (2, 6, 40), "bf16")


def test_columns_are_a_piece_with_the_pitch_of_the_whole():
    piece = QKV.columns(16, 8)
    assert (piece.shape, piece.whole, piece.width) == ((12, 8), (2, 6, 40), 40)
    assert piece.window == (slice(0, 12), slice(16, 24))
    assert piece.view == View((2, 6, 40), 16, 11 * 40 + 8, 40), "up to its last element"


def test_columns_of_a_chunk_of_rows():
    piece = QKV.chunk(3, 4).columns(16, 8)
    assert (piece.shape, piece.whole, piece.window) == ((4, 8), (2, 6, 40), (slice(3, 7), slice(16, 24)))


def test_rows_have_a_window_too():
    assert QKV.chunk(3, 4).window == (slice(3, 7), slice(0, 40))
    assert QKV.batch(1, 1).window == (slice(6, 12), slice(0, 40))


@pytest.mark.parametrize(("start", "count"), [(0, 0), (-1, 4), (36, 5)])
def test_columns_that_are_not_there(start, count):
    with pytest.raises(AssertionError, match="qkv: columns"):
        QKV.columns(start, count)
    with pytest.raises(AssertionError, match="qkv: columns"):
        QKV.columns(0, 8).columns(0, 4)


@pytest.mark.parametrize("scaling", ["current", "tilewise"])
def test_a_held_tensor_is_read_directly_in_its_form(scaling):
    form = Form("e4m3", "row", scaling)
    held = Ref("up", "weight", (6, 40), "bf16", form=form)
    slot = Ref("forward/up", "activation", (6, 40), "bf16", origin=Origin(held=held))
    assert slot.as_form(form) is held
    assert slot.as_form(Form("bf16")).form is None
    assert slot.as_form(Form("e4m3", "col", scaling)).form == Form("e4m3", "col", scaling)
    one = slot.as_form(Form("e4m3", "row", "delayed"))  # it has no amax of earlier steps
    assert one.form == Form("e4m3", "row", "current") and (one is held) == (scaling == "current")


@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("scaling", [name for name in SCALINGS if SCALINGS[name].owns_scales])
def test_columns_of_a_copy_have_their_scales_where_these_lie_together(scaling, layout):
    x, form = np.random.default_rng(1).standard_normal((300, 512)).astype(np.float32), Form("e4m3", layout, scaling)
    scale = own_scales(x, form)
    stored = to_form(x, form, scale)
    assert stored.shape == stored_shape(x.shape, form)
    if (scaling, layout) in (("tilewise", "row"), ("blockwise", "col"), ("blocks", "row"), ("powers", "row")):
        with pytest.raises(AssertionError, match="no scales that lie together"):
            scales_of_columns(scale, form, 128, 200)
        return
    part = stored[128:328] if layout == "col" else stored[:, 128:328]
    piece = Tensor("x", part, (300, 200), form, scales_of_columns(scale, form, 128, 200))
    whole = Tensor("x", stored, x.shape, form, scale)
    np.testing.assert_array_equal(piece.read(), whole.read()[:, 128:328])
