"""Fates: what backward reads is kept, made again by what made it, or fetched from the host."""

import pytest
from hand_made import COL, ROW, grad, recorded, slot, weight

from llmq.plan.passes.fates import Fates, apply, decide
from llmq.tensor import Form

RES, X = slot("res", 0), slot("x", 0, roles=("norm",))
GATE_UP, ACT = slot("gate_up", 0, roles=("ffn",)), slot("act", 0, roles=("swiglu",))
ATT = slot("att", 0, roles=("att",))
FORWARD = [
    recorded("rmsnorm_forward", (X,), (RES, weight("norm"))),
    recorded("linear_forward", (GATE_UP,), (X, weight("up"))),
    recorded("swiglu_forward", (ACT,), (GATE_UP,)),
]
EMBED = recorded("swiglu_forward", (RES,), (slot("in"),))


def wgrad(x):
    return recorded("linear_wgrad", (grad("w"),), (slot("d_y"), x), "backward")


def items(*refs):
    return frozenset((ref.name, ref.form) for ref in refs)


def test_without_a_choice_everything_that_backward_reads_is_kept():
    assert decide([*FORWARD, wgrad(ACT), wgrad(X)], ()) == Fates(kept=items(ACT, X))


def test_what_has_a_role_is_dropped_and_what_makes_it_again_is_needed():
    found = decide([EMBED, *FORWARD, wgrad(ACT)], ("swiglu",))
    assert found == Fates(kept=items(GATE_UP), dropped={"act": frozenset({None})})
    found = decide([EMBED, *FORWARD, wgrad(ACT)], ("swiglu", "ffn"))
    assert found == Fates(kept=items(X), dropped={name: frozenset({None}) for name in ("act", "gate_up")})
    assert decide([EMBED, *FORWARD, wgrad(ACT)], ("norm",)) == Fates(kept=items(ACT)), "x is not read in backward"


def test_slots_can_be_dropped_by_name_and_are_offloaded_before_they_are_dropped():
    calls = [EMBED, *FORWARD, wgrad(ACT), wgrad(X)]
    assert decide(calls, (), drop=("act",)) == Fates(items(GATE_UP, X), dropped={"act": frozenset({None})})
    found = decide(calls, ("swiglu", "norm"), offload=("act", "res"))
    assert found == Fates(offloaded=items(ACT, RES), dropped={"x": frozenset({None})})


def test_a_copy_is_kept_instead_of_its_value_and_dropped_beside_it():
    copy = X.as_form(COL)
    assert decide([EMBED, *FORWARD, wgrad(copy)], ()) == Fates(kept=items(copy))
    found = decide([EMBED, *FORWARD, wgrad(copy), wgrad(X)], ())
    assert found == Fates(items(X), dropped={"x": frozenset({COL})}, copies=frozenset({"x"}))


def test_a_form_that_its_producer_cannot_write_is_made_again_from_the_value():
    attention = recorded("attention_forward", (ATT, slot("lse", 0)), (X,))
    found = decide([EMBED, FORWARD[0], attention, wgrad(ATT.as_form(COL))], ("att",))
    assert found == Fates(items(X), dropped={"att": frozenset({None, COL})})
    found = decide([EMBED, *FORWARD, wgrad(ACT.as_form(COL))], ("swiglu",))
    assert found == Fates(items(GATE_UP), dropped={"act": frozenset({COL})}), "swiglu writes it in its own pass"


def test_a_slot_that_several_calls_add_up_is_made_again_by_all_of_them():
    low = slot("low", 0)
    branch = [
        recorded("linear_forward", (low,), (X, weight("a"))),
        recorded("linear_forward", (GATE_UP,), (low, weight("b"), None, GATE_UP)),
    ]
    found = decide([EMBED, *FORWARD[:2], *branch, wgrad(GATE_UP)], ("ffn",))
    assert found == Fates(items(X, low), dropped={"gate_up": frozenset({None})})


# what is decided is applied to a recording in which every forward call is replayed


def replayed(op, outputs, inputs):
    return recorded(op, outputs, inputs, "replay")


def again(ref):
    return slot(ref.name, ref.layer, roles=ref.roles, form=ref.form, again=True)


def test_without_recompute_no_replayed_call_is_left():
    calls = [FORWARD[2], replayed("swiglu_forward", (ACT,), (GATE_UP,)), wgrad(ACT)]
    assert apply(calls, Fates(kept=items(ACT))) == [calls[0], calls[2]]


def test_what_was_dropped_is_made_again_and_read_from_its_second_life():
    forward, copied = FORWARD[2], ACT.as_form(COL)
    calls = [forward, replayed("swiglu_forward", (ACT,), (GATE_UP,)), wgrad(ACT), wgrad(copied)]
    assert apply(calls, Fates(dropped={"act": frozenset({None})})) == [
        forward,
        replayed("swiglu_forward", (again(ACT),), (GATE_UP,)),  # what it reads is kept: its first life
        wgrad(again(ACT)),
        wgrad(copied),  # this form was not dropped
    ]


def test_a_chain_that_was_dropped_reads_its_own_second_lives():
    calls = [replayed("linear_forward", (GATE_UP,), (X, weight("up"))), replayed("swiglu_forward", (ACT,), (GATE_UP,))]
    fates = Fates(dropped={name: frozenset({None}) for name in ("gate_up", "act")})
    assert apply(calls, fates) == [
        replayed("linear_forward", (again(GATE_UP),), (X, weight("up"))),
        replayed("swiglu_forward", (again(ACT),), (again(GATE_UP),)),
    ]


def test_a_dropped_copy_of_a_kept_value_is_cast_again():
    calls = [replayed("attention_forward", (ATT, slot("lse", 0)), (X,)), wgrad(ATT.as_form(COL))]
    fates = Fates(items(ATT), dropped={"att": frozenset({COL})}, copies=frozenset({"att"}))
    assert apply(calls, fates) == [replayed("cast", (again(ATT),), (ATT,)), wgrad(again(ATT.as_form(COL)))]


def test_a_copy_is_cast_before_its_first_reader():
    """Which is replayed before what made the value, where a layer's first map reads the stream itself."""
    copy, qkv = RES.as_form(ROW), slot("qkv", 1)
    calls = [replayed("linear_forward", (qkv,), (copy, weight("w"))), wgrad(copy), EMBED]
    fates = Fates(items(RES), dropped={"res": frozenset({ROW}), "qkv": frozenset({None})}, copies=frozenset({"res"}))
    assert apply(calls, fates) == [
        replayed("cast", (again(RES),), (RES,)),
        replayed("linear_forward", (again(qkv),), (again(copy), weight("w"))),
        wgrad(again(copy)),
        EMBED,
    ]


def test_a_replay_writes_only_the_outputs_that_were_dropped():
    calls = [replayed("rmsnorm_forward", (X, slot("rstd", 0)), (RES, weight("norm")))]
    (call,) = apply(calls, Fates(dropped={"x": frozenset({None})}))
    assert call == replayed("rmsnorm_forward", (again(X), None), (RES, weight("norm")))


@pytest.mark.parametrize("form", [None, ROW, Form("e4m3", "col", "blockwise")])
def test_an_offloaded_slot_is_not_made_again_but_read_in_its_second_life(form):
    """By the backward pass, and by what is replayed of it."""
    copy = X if form is None else X.as_form(form)
    calls = [
        FORWARD[0],
        replayed("rmsnorm_forward", (X,), (RES, weight("norm"))),
        replayed("linear_forward", (GATE_UP,), (copy, weight("up"))),
        wgrad(copy),
    ]
    fates = Fates(offloaded=items(copy), dropped={"gate_up": frozenset({None})})
    assert apply(calls, fates) == [
        FORWARD[0],
        replayed("linear_forward", (again(GATE_UP),), (again(copy), weight("up"))),
        wgrad(again(copy)),
    ]
