"""The recorder notes what is written and read, and replays only what was dropped."""

import pytest

from llmq.ops.record import Recompute, Recorder, Replay
from llmq.tensor import Form, Ref

COL = Form("e4m3", "col", "delayed")


def ref(name, **more):
    return Ref(name, "activation", (2, 3, 4), "bf16", **more)


def test_arguments_are_split_at_the_slash():
    ops = Recorder()
    ops.linear_forward(ref("y"), ref("x"), ref("w"), None, ref("res"))
    (call,) = ops.calls
    assert (call.op, call.phase) == ("linear_forward", "forward")
    assert call.outputs == (ref("y"),) and call.inputs == (ref("x"), ref("w"), None, ref("res"))


def test_a_call_with_nothing_to_write_is_not_made():
    ops = Recorder()
    ops.bias_backward(None, ref("d_y"))
    assert not ops.calls
    ops.rmsnorm_backward(ref("d"), None, ref("d_x"), ref("d_res"), ref("res"), ref("w"), ref("rstd"))
    assert ops.calls[0].outputs == (ref("d"), None)


def test_an_unknown_op_is_an_error():
    with pytest.raises(KeyError, match="rmsnorm_sideways"):
        Recorder().rmsnorm_sideways(ref("x"))


def test_without_recompute_a_replay_makes_no_call():
    ops = Recorder(phase="backward")
    Replay(ops).swiglu_forward(ref("act"), ref("gate_up"))
    assert not ops.calls


def test_what_was_dropped_is_made_again_and_read_from_its_second_life():
    ops = Recorder(Recompute({"act": frozenset({None})}), phase="backward")
    Replay(ops).swiglu_forward(ref("act"), ref("gate_up"))
    ops.linear_wgrad(ref("dw"), ref("d_y"), ref("act"))
    ops.linear_wgrad(ref("dw"), ref("d_y"), ref("act", form=COL))
    replayed, plain, copied = ops.calls
    assert replayed.phase == "replay" and replayed.outputs == (ref("act", again=True),)
    assert replayed.inputs == (ref("gate_up"),)  # kept: its first life
    assert plain.inputs[1] == ref("act", again=True)
    assert copied.inputs[1] == ref("act", form=COL)  # this form was not dropped


def test_a_dropped_copy_of_a_kept_value_is_cast_again():
    ops = Recorder(Recompute({"att": frozenset({COL})}, frozenset({"att"})), phase="backward")
    Replay(ops).attention_forward(ref("att"), ref("lse"), ref("rot"), num_heads=1)
    (cast,) = ops.calls
    assert cast.op == "cast" and cast.outputs == (ref("att", again=True),) and cast.inputs == (ref("att"),)


def test_a_replay_writes_only_the_outputs_that_were_dropped():
    ops = Recorder(Recompute({"x": frozenset({None})}), phase="backward")
    Replay(ops).rmsnorm_forward(ref("x"), ref("rstd"), ref("res"), ref("w"), eps=1e-6)
    assert ops.calls[0].outputs == (ref("x", again=True), None)
