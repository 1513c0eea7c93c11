"""Accumulate and collect: which writes add, and which are counted in the amax of delayed scales."""

from dataclasses import replace

import pytest
from hand_made import COL, ROW, formed, grad, slot, wanting, weight

from llmq.plan.passes.accumulate import accumulate, collect
from llmq.tensor import Form, Ref

X, D_Y = slot("0/3.mlp.x", 3), slot("d_y")
SUMS = tuple(Ref(name, "sum", (1,), "fp32") for name in ("loss", "tokens", "hits"))


def wgrad(name):
    return formed("linear_wgrad", (grad(name),), (D_Y, X))


CALLS = [
    formed("swiglu_forward", (X,), (D_Y,)),
    formed("loss_sum", SUMS, (D_Y, D_Y, D_Y)),
    wgrad("w"),
    wgrad("v"),
    wgrad("w"),
    formed("loss_sum", SUMS, (D_Y, D_Y, D_Y)),
]


def flags(calls):
    return [[result.accumulate for result in call.outputs if result is not None] for call in calls]


def test_the_first_write_of_each_overwrites_and_the_others_add():
    found = accumulate(CALLS, first=True)
    assert flags(found) == [[False], [False] * 3, [False], [False], [True], [True] * 3]
    assert found[:4] == CALLS[:4]


def test_all_add_after_the_first_micro_step():
    found = accumulate(CALLS, first=False)
    assert flags(found) == [[False], [True] * 3, [True], [True], [True], [True] * 3]
    assert [replace(r, accumulate=False) for c in found for r in c.outputs] == [r for c in CALLS for r in c.outputs]


def test_pieces_are_written_first_each_on_its_own():
    one, other = grad("w").chunk(0, 4), grad("w").chunk(4, 4)
    calls = [formed("linear_wgrad", (piece,), (D_Y, X)) for piece in (one, other, one)]
    assert flags(accumulate(calls, first=True)) == [[False], [False], [True]]


def amax(call):
    (call,) = collect([call])
    return [result.amax for result in call.outputs if result is not None]


def test_every_write_of_a_copy_with_a_cell_is_counted():
    both = formed("rmsnorm_forward", (wanting(X, None, ROW, COL), slot("rstd")), (D_Y, weight("norm")))
    assert amax(both) == [("3.mlp.x@e4m3",), ()]
    wide = Form("e5m2", "row", "delayed")
    assert amax(formed("swiglu_forward", (wanting(X, ROW, wide),), (D_Y,))) == [("3.mlp.x@e4m3", "3.mlp.x@e5m2")]
    pieces = formed("cross_entropy", (wanting(slot("0/d.logits#2"), ROW),), (D_Y, D_Y))
    assert amax(pieces) == [("d.logits@e4m3",)], "pieces of a value share a cell"
    master = Ref("w", "master", (8, 8), "fp32")
    assert amax(formed("cast", (wanting(weight("w"), ROW),), (master,), "update")) == [("w@e4m3",)]


@pytest.mark.parametrize("scaling", ["current", "rowwise", "blockwise", None])
def test_copies_without_a_cell_are_not(scaling):
    call = formed("cast", (wanting(X, Form("e4m3", "row", scaling)),), (D_Y,))
    assert collect([call]) == [call]


def test_what_is_made_again_or_of_another_copy_was_counted_before():
    calls = [
        formed("swiglu_forward", (wanting(replace(X, again=True), ROW),), (D_Y,), "replay"),
        formed("cast", (wanting(X, COL),), (replace(X, form=ROW),)),
        formed("copy_to_device", (wanting(slot("buffer"), ROW),), (weight("w", form=ROW),)),
    ]
    assert collect(calls) == calls
