"""Transfers: what waits on the host leaves once it is whole, and comes back a layer ahead."""

from dataclasses import replace

from hand_made import formed, grad, slot, wanting, weight

from llmq.ops.seam import record
from llmq.plan.passes.transfers import starts_of_blocks, transfers
from llmq.tensor import Form

A0, A1 = slot("a0", 0), slot("a1", 1)
FORM = Form("e4m3", "col", "blockwise")


def forward(out, *inputs):
    return formed("swiglu_forward", (out,), inputs)


def backward(number, read):
    """What a layer's backward pass writes of its own, and of the weight."""
    return formed("linear_dgrad", (slot(f"d{number}", number),), (read, weight("w")), "backward")


def moved(calls):
    """The copies among them, by op: name, home and life of what is read and written; everything else by its index."""
    found = []
    for call in calls:
        if call.op.startswith("copy_"):
            (result,), (source,) = call.outputs, call.inputs
            assert (call.lane, call.phase) == (record(call.op).lane, "transfer")
            assert result.forms == (source.form,) and result.ref.shape == source.shape
            assert (source.home, result.ref.home) == (("device", "host") if "host" in call.op else ("host", "device"))
            found.append((call.op, result.ref.name.split("@")[0], result.ref.again))
        else:
            found.append(call)
    return found


HEAD = formed("linear_wgrad", (grad("head"),), (slot("y"), slot("y")))
CALLS = [forward(A0, slot("y")), forward(A1, slot("y")), HEAD]
CALLS += [backward(1, replace(A1, again=True)), backward(0, replace(A0, again=True))]


def test_a_slot_leaves_right_after_its_write_and_comes_back_in_front_of_the_layer_before():
    in_first, in_second, head, first, second = CALLS
    assert moved(transfers(CALLS, {("a0", None), ("a1", None)})) == [
        in_first,
        ("copy_to_host", "a0", False),
        in_second,
        ("copy_to_host", "a1", False),
        ("copy_to_device", "a1", True),
        head,
        ("copy_to_device", "a0", True),
        first,
        second,
    ]


def test_nothing_else_moves():
    assert transfers(CALLS, ()) == CALLS
    only = transfers(CALLS, {("a0", None)})
    assert [call.op for call in only if call.lane != "main"] == ["copy_to_host", "copy_to_device"]
    assert [call for call in only if call.lane == "main"] == CALLS


def test_a_slot_that_several_calls_write_leaves_after_the_last_of_them():
    """Pieces of it, or what adds to it; it leaves whole."""
    pieces = [forward(A0.chunk(start, 4), slot("y")) for start in (0, 4)]
    found = transfers([*pieces, *CALLS[1:]], {("a0", None)})
    assert moved(found)[:3] == [*pieces, ("copy_to_host", "a0", False)]
    (source,) = found[2].inputs
    assert source == A0


def test_each_form_moves_unchanged():
    """The value beside it stays where it is."""
    both = forward(wanting(A0, None, FORM), slot("y"))
    read = backward(0, replace(A0, form=FORM, again=True))
    found = transfers([both, *CALLS[1:4], read], {("a0", FORM)})
    copies = [call for call in found if call.lane != "main"]
    assert [call.inputs[0].form for call in copies] == [call.outputs[0].forms[0] for call in copies] == [FORM, FORM]
    assert copies[0].inputs == (replace(A0, form=FORM),)
    assert copies[1].written == (replace(A0, form=FORM, again=True),)


def test_what_the_host_keeps_is_what_comes_back():
    """The one's output is the other's input, a storage of its own in the home of neither end."""
    stored, fetched = [call for call in transfers(CALLS, {("a0", None)}) if call.lane != "main"]
    assert stored.written == fetched.inputs and stored.inputs == (A0,) and fetched.written == (replace(A0, again=True),)


def test_it_comes_back_for_its_first_read():
    """Of a layer, and of several."""
    again = replace(A0, again=True)
    found = moved(transfers([*CALLS, backward(0, again), HEAD, backward(2, again)], {("a0", None)}))
    assert found.count(("copy_to_device", "a0", True)) == 1
    assert found[found.index(("copy_to_device", "a0", True)) + 1] == CALLS[3]


def test_a_block_begins_where_the_layer_changes():
    """For each call, where the one before its own does."""
    layers = [forward(slot("x", layer), slot("y")) for layer in (0, 0, 1, 1, None, 1, 0, 0)]
    assert starts_of_blocks(layers) == [0, 0, 0, 0, 2, 4, 5, 5]
