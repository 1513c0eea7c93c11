"""Fuse: a norm, a linear map and SwiGLU that follow each other are one call, if nothing else reads what is between."""

from dataclasses import replace

import pytest
from hand_made import recorded, weight

from llmq.ops.record import Result
from llmq.plan.passes.fuse import fuse
from llmq.tensor import Form, Ref, View


def token(name, width=8, tokens=1):
    return Ref(name, "activation", (tokens, 1, width), "bf16")


RES, X, RSTD, Y, ACT, OUT = (token(name) for name in ("res", "x", "rstd", "y", "act", "out"))
NORM = replace(recorded("rmsnorm_forward", (X, RSTD), (RES, weight("norm"))), numbers={"eps": 1e-6})
UP = recorded("linear_forward", (Y,), (X, weight("up"), weight("bias"), None))
SWIGLU = recorded("swiglu_forward", (ACT,), (Y,))
DOWN = recorded("linear_forward", (OUT,), (ACT, weight("down"), None, RES))


def test_a_sublayer_is_two_calls():
    up, down = fuse([NORM, UP, SWIGLU, DOWN])
    assert up.op == down.op == "token_linear"
    assert [result.ref for result in up.outputs] == [ACT] and [result.ref for result in down.outputs] == [OUT]
    assert up.inputs == (RES, weight("norm"), weight("up"), weight("bias"), None)
    assert down.inputs == (ACT, None, weight("down"), None, RES)
    other = fuse([NORM, UP, replace(SWIGLU, numbers={"activation": "gelu"}), DOWN])
    assert other == [replace(up, numbers={**up.numbers, "activation": "gelu"}), down]
    assert up.numbers == {"eps": 1e-6, "gated": True} and down.numbers == {"eps": 0.0, "gated": False}


def test_what_is_added_to_the_weight_of_a_norm_goes_with_it():
    norm = replace(NORM, numbers={"eps": 1e-6, "offset": 1.0})
    assert [call.numbers for call in fuse([norm, UP])] == [{"eps": 1e-6, "offset": 1.0, "gated": False}]
    assert [call.numbers for call in fuse([norm, UP, SWIGLU])] == [{"eps": 1e-6, "offset": 1.0, "gated": True}]


@pytest.mark.parametrize("between", [X, RSTD, Y])
def test_what_is_read_elsewhere_is_still_made(between):
    calls = [NORM, UP, SWIGLU, recorded("swiglu_forward", (token("more"),), (between,))]
    made = fuse(calls)
    assert between in [result.ref for call in made for result in call.outputs]
    assert made[-1] == calls[-1] and len(made) == 3


def test_swiglu_of_a_sum_stays():
    sum_of = replace(UP, inputs=(*UP.inputs[:3], RES))
    assert [call.op for call in fuse([NORM, sum_of, SWIGLU])] == ["token_linear", "swiglu_forward"]


def test_calls_that_do_not_follow_each_other_stay():
    other = recorded("swiglu_forward", (token("other"),), (RES,))
    assert [call.op for call in fuse([NORM, other, UP])] == ["rmsnorm_forward", "swiglu_forward", "token_linear"]
    assert fuse([NORM, other]) == [NORM, other]


def test_a_norm_of_more_than_a_block_of_a_gpu_holds_stays():
    for width, ops in ((12288, ["token_linear"]), (12290, ["rmsnorm_forward", "token_linear"])):
        x = token("x", width, 4)
        calls = [replace(NORM, outputs=(Result(x), None)), replace(UP, inputs=(x, *UP.inputs[1:]))]
        assert [call.op for call in fuse(calls)] == ops


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": (token("x", tokens=5), *UP.inputs[1:])},
        {"inputs": (X.as_form(Form("e4m3", "row", "delayed")), *UP.inputs[1:])},
        {"inputs": (X, replace(weight("up"), view=View((2, 8), 0, 8)), None, None)},
        {"numbers": {"alpha": 0.5}},
    ],
    ids=["many tokens", "a copy", "a piece", "scaled"],
)
def test_other_linear_maps_stay(change):
    calls = [NORM, replace(UP, **change), SWIGLU]
    assert fuse(calls) == calls
