"""The recorder notes what is written and read, and in which phase."""

import copy

import pytest

from llmq.ops.record import Backward, Call, Recorder, Replay, Result
from llmq.tensor import Form, Ref

ROW = Form("e4m3", "row", "delayed")


def ref(name, **more):
    return Ref(name, "activation", (2, 3, 4), "bf16", **more)


def test_arguments_are_split_at_the_slash():
    ops = Recorder()
    ops.linear_forward(ref("y"), ref("x"), ref("w"), None, ref("res"), alpha=0.5)
    inputs = (ref("x"), ref("w"), None, ref("res"))
    assert ops.calls == [Call("linear_forward", (Result(ref("y")),), inputs, {"alpha": 0.5}, "forward")]


def test_a_call_with_nothing_to_write_is_not_made():
    ops = Recorder()
    ops.bias_backward(None, ref("d_y"))
    assert not ops.calls
    ops.rmsnorm_backward(ref("d"), None, ref("d_x"), ref("d_res"), ref("res"), ref("w"), ref("rstd"))
    assert ops.calls[0].outputs == (Result(ref("d")), None)


@pytest.mark.parametrize("phase", [lambda ops: ops, Backward, Replay])
def test_an_unknown_op_is_an_error(phase):
    with pytest.raises(KeyError, match="rmsnorm_sideways"):
        phase(Recorder()).rmsnorm_sideways(ref("x"))


def test_phases_of_a_program_are_noted_in_one_list():
    """All replays are: which of them are made is decided later."""
    forward = Recorder()
    backward = Backward(forward)
    for ops in (forward, Replay(backward), backward, Replay(forward), Recorder(phase="update")):
        ops.swiglu_forward(ref("act"), ref("gate_up"))
    assert [call.phase for call in forward.calls] == ["forward", "replay", "backward", "replay"]


def test_what_is_written_has_a_ref_for_each_wanted_form():
    copy = ref("x", form=ROW)
    call = Call("rmsnorm_forward", (Result(ref("x"), (None, ROW)), Result(ref("rstd"))), (), {}, "forward")
    assert call.written == (ref("x"), copy)
    assert Result(copy, (ROW,)).refs == (copy,)


def test_a_recorder_can_be_copied_and_asked_for_what_is_no_op():
    assert not hasattr(Recorder(), "__wrapped__") and copy.copy(Recorder()).calls == []
