"""Lanes: what a call waits for, and no more."""

from dataclasses import replace

import pytest
from hand_made import COL, ROW, formed, grad, slot, wanting, weight

from llmq.plan.passes.lanes import blocks, joined, lanes
from llmq.tensor import Form

A, B, C, H, G = (slot(name) for name in "abchg")


def on(lane, out, *inputs):
    """A call on a lane."""
    return formed("linear_forward", (out,), (*inputs, weight("w"))[:2], lane=lane)


def main(out, *inputs):
    return on("main", out, *inputs)


def copy(out, *inputs):
    return on("to_host", out, *inputs)


def waits(*calls):
    """The waits of each call; nothing else of it changes."""
    found = lanes(calls)
    assert [replace(call, waits=()) for call in found] == list(calls)
    return [call.waits for call in found]


def test_one_lane_needs_no_waits():
    calls = [main(A, B), main(B, A), main(A, B)]
    assert lanes(calls) == calls


def test_a_read_waits_for_the_write_before_it():
    assert waits(main(A), copy(H, A), main(B, H)) == [(), (0,), (1,)]
    assert waits(main(A), main(A), copy(H, A)) == [(), (), (1,)], "the last one"


def test_an_overwrite_waits_for_the_reads_before_it():
    calls = [main(A), main(H), copy(H, A), main(B), main(A)]
    assert waits(*calls) == [(), (), (1,), (), (2,)]
    reads = [on(lane, slot(lane), A) for lane in ("to_host", "comm")]
    assert waits(main(A), *reads, main(A)) == [(), (0,), (0,), (1, 2)], "all of them"


def test_an_overwrite_waits_for_the_write_before_it():
    assert waits(main(A), copy(H), main(H)) == [(), (0,), (1,)]
    assert waits(main(H), main(A), copy(H)) == [(), (), (0,)], "no later call than that: it is not the first write"


def test_within_a_lane_the_order_is_enough():
    assert waits(main(A), copy(H, A), copy(G, H), copy(H, G), main(B)) == [(), (0,), (), (), ()]


def test_what_a_wait_implies_is_left_out():
    """Of the lane itself, and through others."""
    assert waits(main(A), main(B), copy(H, A), copy(H, B)) == [(), (), (1,), ()], "the second write follows the first"
    calls = [main(A), copy(H, A), on("comm", G, H), main(B, G), main(C, H)]
    assert waits(*calls) == [(), (0,), (1,), (2,), ()]


def test_the_first_write_of_a_slot_off_the_main_lane_waits_for_the_call_before_it():
    """The slot may take the bytes of one that this call was the last to read."""
    assert waits(main(A), main(B, A), copy(H), copy(H)) == [(), (), (1,), ()]
    assert waits(copy(H), main(A)) == [(), ()], "there is none before it"
    assert waits(main(A), main(B, A), copy(grad("w"))) == [(), (), (1,)]


def in_layer(number):
    return main(slot(f"x{number}", number))


def test_two_layers_on_the_main_lane_waits_for_every_side_call():
    """Once, and for all that is on that lane."""
    calls = [in_layer(0), copy(H), copy(G), in_layer(1), in_layer(1), in_layer(2), in_layer(2), in_layer(3)]
    assert waits(*calls) == [(), (0,), (), (), (), (2,), (), ()]
    assert joined(lanes(calls)) == {1: 5, 2: 5}


def test_a_side_call_that_was_waited_for_sooner_is_not_waited_for_again():
    calls = [in_layer(0), copy(H), main(slot("x1", 1), H), in_layer(2), in_layer(3)]
    assert waits(*calls) == [(), (0,), (1,), (), ()]
    assert joined(lanes(calls)) == {1: 2}


def test_what_waits_for_a_copy_here_waits_for_those_to_the_host_recorded_before_it():
    """So that the pieces of an update take the memory of each other."""
    here = [on("to_device", slot(f"here{number}")) for number in range(3)]
    calls = [here[0], here[1], main(B, slot("here0")), copy(H, B), here[2], main(C, slot("here1")), copy(G, C)]
    calls = [*calls, main(A, slot("here2"))]
    assert waits(*calls) == [(), (), (0,), (2,), (2,), (1,), (5,), (3, 4)]


def test_what_nothing_waits_for_is_done_at_the_end():
    calls = lanes([in_layer(0), copy(H), in_layer(1)])
    assert joined(calls) == {1: len(calls)}


def test_layers_are_counted_as_the_main_lane_changes_them():
    calls = [main(A), in_layer(0), copy(slot("x7", 7)), in_layer(0), in_layer(1), main(A), in_layer(1)]
    assert blocks(calls) == [0, 1, 1, 1, 2, 3, 4]


@pytest.mark.parametrize("form", [Form("e4m3", "row", "rowwise"), Form("e4m3", "row", "current")])
def test_the_scales_of_a_copy_are_read_and_written_with_it(form):
    """Its own are written with it; a measured one by another call, before it."""
    scale = formed("amax_scale", (replace(A, name="a@scale/e4m3", shape=(1,), dtype="fp32"),), (A,))
    made = formed("cast", (wanting(B, form),), (A,), lane="to_host")
    first = [main(A)] if form.owns_scales else [main(A), scale]
    assert waits(*first, main(C), made)[-1] == (len(first),), "the call before it, as it is the first write"
    assert waits(*first, made, main(C, replace(B, form=form)))[-1] == (len(first),)
    again = [*first, made, formed("cast", (wanting(B, form),), (A,))]
    assert waits(*again)[-1] == (len(first),)


def test_a_measured_scale_is_waited_for():
    """What measures it is on another lane than what casts with it."""
    form = Form("e4m3", "row", "current")
    slots = [replace(A, name="a@scale/e4m3", shape=(1,), dtype="fp32"), replace(A, form=form)]
    scale = formed("amax_scale", (slots[0],), (A,), lane="comm")
    cast = formed("cast", (wanting(A, form),), (A,))
    assert waits(main(A), scale, cast)[-1] == (1,)
    measured_again = [
        main(A),
        scale,
        cast,
        formed("linear_forward", (B,), (slots[1], weight("w")), lane="to_host"),
        scale,
    ]
    assert waits(*measured_again)[-1] == (3,), "not while a copy is read that has the old one"


def test_a_sum_is_read_where_it_is_added_to():
    added = replace(wanting(grad("w"), None), accumulate=True)
    reduced = formed("linear_wgrad", (added,), (A, A), lane="comm")
    calls = [main(A), formed("linear_wgrad", (grad("w"),), (A, A)), reduced, formed("linear_wgrad", (added,), (A, A))]
    assert waits(*calls) == [(), (), (1,), (2,)]


def test_forms_of_a_slot_are_storages_of_their_own():
    calls = [main(wanting(A, None, ROW)), main(B), formed("cast", (wanting(A, COL),), (A,), lane="to_host")]
    assert waits(*calls, main(C, replace(A, form=ROW)))[-1] == ()
    assert waits(*calls, main(C, replace(A, form=COL)))[-1] == (2,)


def test_what_another_lane_has_waited_for_is_known_through_it():
    calls = [in_layer(0), copy(H), on("comm", G, H), main(slot("x", 0), G), in_layer(1), in_layer(2), in_layer(3)]
    assert joined(lanes(calls)) == {1: 3, 2: 3}
