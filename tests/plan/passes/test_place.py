"""Place: lifetimes, homes, shared memory, and never two living slots on the same bytes."""

import random
from dataclasses import replace
from itertools import combinations

import pytest
from hand_made import COL, formed, grad, slot, wanting, weight

from llmq.plan.arena import aligned
from llmq.plan.names import storage_name
from llmq.plan.passes.lanes import lanes
from llmq.plan.passes.place import Placement, place
from llmq.tensor import Form, Ref, stored_bytes

SIZE = 256  # bytes of a bf16 slot (2,8,8), a whole unit of the arena


def value(name, **more):
    return replace(slot(name), shape=(2, 8, 8), **more)


A, B, C, D = (value(name) for name in "abcd")
TURNED = Form("bf16", "col")
SMALL = replace(B, shape=(1, 8, 8))


def plain(out, *inputs):
    """A call of an op whose output takes memory of its own."""
    return formed("swiglu_forward", (out,), inputs)


def turned(out, source):
    """A call whose output may take its input's memory."""
    return formed("rope_forward", (out,), (source, Ref("rope", "const", (8, 4), "fp32")))


def used(*sources):
    """A call that only reads slots."""
    return formed("linear_wgrad", (grad("w"),), sources)


def offsets(program):
    return {name: place.offset // SIZE for name, place in program.places.items()}


def test_bytes_are_taken_again_once_their_slot_was_read_last():
    program = place("one", [plain(A), plain(B, A), plain(C, B), plain(D, C)])
    assert offsets(program) == {"a": 0, "b": 1, "c": 0, "d": 1}
    assert program.arena_bytes == program.live_bytes == {"device": 2 * SIZE, "host": 0}
    assert program.births == {0: ("a",), 1: ("b",), 2: ("c",), 3: ("d",)}
    assert program.deaths == {1: ("a",), 2: ("b",), 3: ("c", "d")}
    assert program.calls == (plain(A), plain(B, A), plain(C, B), plain(D, C))


def test_only_slots_are_placed():
    program = place("one", [formed("cast", (weight("w"),), (replace(weight("w"), space="master"),))])
    assert (program.places, program.arena_bytes) == ({}, {"device": 0, "host": 0})


def test_homes_have_arenas_of_their_own():
    there = value("there", home="host")
    calls = [plain(A), formed("copy_to_host", (there,), (A,), lane="main"), plain(B), plain(C, B)]
    calls += [formed("copy_to_device", (value("a", again=True),), (there,), lane="main"), used(value("a", again=True))]
    program = place("one", calls)
    ((name, on_host),) = [(name, found) for name, found in program.places.items() if found.home == "host"]
    assert name.startswith("there") and on_host == Placement(0, SIZE, "host")
    assert program.arena_bytes == program.live_bytes == {"device": 2 * SIZE, "host": SIZE}
    assert program.places["a~"].home == "device"


def test_an_output_takes_the_memory_of_what_is_read_last_there():
    program = place("one", [plain(A), turned(B, A), turned(C, B), used(C)])
    assert offsets(program) == {"a": 0, "b": 0, "c": 0}
    assert (program.births, program.deaths) == ({0: ("a",)}, {3: ("a",)}), "one slot, from the first to the last"
    assert program.arena_bytes["device"] == SIZE


@pytest.mark.parametrize(
    "calls",
    [
        [plain(A), turned(B, A), used(A, B)],  # it is read again
        [plain(A), plain(B, A), used(B)],  # the op reads what it has written over
        [plain(A), turned(SMALL, A), used(SMALL)],
        [plain(A.batch(0, 1)), plain(A), turned(B, A.batch(0, 1)), used(B)],
        [plain(A), turned(B.batch(0, 1), A), plain(B), used(B)],
        [plain(wanting(A, TURNED)), turned(B, replace(A, form=TURNED)), used(B)],
        [plain(A), turned(wanting(B, COL), A), used(replace(B, form=COL))],
    ],
    ids=["read again", "no such op", "another size", "a piece", "into a piece", "of a form", "in a form"],
)
def test_memory_is_not_shared_otherwise(calls):
    found = place("one", calls).places
    (a,) = [found[name] for name in found if name.startswith("a")]
    (b,) = [found[name] for name in found if name.startswith("b")]
    assert a.offset + a.size <= b.offset or b.offset + b.size <= a.offset


def test_pieces_have_the_bytes_of_the_whole():
    whole = plain(A)
    one, other = A.chunk(0, 8), A.chunk(8, 8)
    for calls in ([plain(one), whole, used(other)], [plain(one), plain(other), used(one, other)]):
        assert place("one", calls).places == {"a": Placement(0, SIZE)}


def test_scales_that_a_copy_owns_live_as_long_as_it():
    form = Form("e4m3", "row", "rowwise")
    copy = replace(A, form=form)
    program = place("one", [plain(D), formed("quantize", (wanting(A, form),), (D,)), plain(B), plain(C, B), used(copy)])
    scales = "a@scale/e4m3/row/rowwise"
    assert program.births[1] == (storage_name(copy), scales) and set(program.deaths[4]) == {storage_name(copy), scales}
    assert program.places[scales].size == 4 * 16
    check(program)


def test_a_measured_scale_lives_until_the_last_read_of_its_copies():
    form = Form("e4m3", "row", "current")
    scale, copy = Ref("a@scale/e4m3", "activation", (1,), "fp32"), replace(A, form=form)
    calls = [plain(A), formed("amax_scale", (scale,), (A,)), formed("cast", (wanting(A, form),), (A,))]
    program = place("one", [*calls, plain(B), plain(C, B), used(copy)])
    assert program.births[1] == (scale.name,) and set(program.deaths[5]) == {scale.name, storage_name(copy)}
    check(program)


def test_a_slot_that_was_never_written_is_an_error():
    with pytest.raises(AssertionError, match="b is read before it is written"):
        place("one", [plain(A), used(B)])


def test_what_another_lane_reads_lives_until_the_main_lane_has_waited_for_it():
    """In the order of recording its bytes may be another's at once."""
    there = value("there", home="host")
    layers = [plain(replace(value(f"x{number}"), layer=number)) for number in range(4)]
    calls = [plain(A), formed("copy_to_host", (there,), (A,)), *layers]
    program = place("one", lanes(calls))
    waiting = next(index for index, call in enumerate(program.calls) if 1 in call.waits)
    assert waiting == 3 and "a" in program.deaths[waiting]
    here = place("one", [replace(call, lane="main") for call in calls])
    assert "a" in here.deaths[1]


def test_what_collectives_touch_that_may_be_made_as_one_lives_while_all_run():
    """In the order of recording the second result could take the bytes of what the first one reads."""
    gathers = [formed("all_gather", (out,), (share,), lane="main") for out, share in ((C, A), (D, B))]
    program = place("one", [plain(A), plain(B), *gathers, used(C, D)])
    assert len(set(offsets(program).values())) == 4 and program.births[2] == ("c", "d")
    apart = place("one", [plain(A), plain(B), gathers[0], used(C), gathers[1], used(C, D)])
    assert offsets(apart)["d"] == offsets(apart)["a"]


def check(program):
    """No two slots that live at the same call lie on the same bytes, unless one took over the other's; brute force."""
    lives, sizes = {}, {}
    for index, call in enumerate(program.calls):
        for ref in (*filter(None, call.inputs), *call.written):
            if ref.space == "activation":
                lives.setdefault(storage_name(ref), [index, index])[1] = index
                sizes.setdefault(storage_name(ref), stored_bytes(ref))
    assert set(lives) <= set(program.places)
    for one, other in combinations(sorted(lives, key=lambda name: lives[name][0]), 2):
        first, second = program.places[one], program.places[other]
        handed_over = lives[one][1] == lives[other][0] and first == second
        alive = lives[one][1] >= lives[other][0] and first.home == second.home
        apart = first.offset + sizes[one] <= second.offset or second.offset + sizes[other] <= first.offset
        assert apart or handed_over or not alive, (one, other)
    for home, most in program.arena_bytes.items():
        assert most >= program.live_bytes[home]
        ends = [found.offset + aligned(found.size) for found in program.places.values() if found.home == home]
        assert max(ends, default=0) == most


@pytest.mark.parametrize("seed", range(20))
def test_no_two_living_slots_overlap(seed):
    """Random programs of random sizes, homes, and ops that share memory or do not."""
    rng = random.Random(seed)
    slots, calls = [], []
    for number in range(60):
        home = rng.choice(["device", "device", "host"])
        shape = (rng.choice([1, 2, 5]), 8, rng.choice([8, 24]))
        ref = replace(value(f"s{number}", home=home), shape=shape)
        recent = slots[-8:]
        source = rng.choice(recent) if recent else None
        if source is not None and rng.random() < 0.5:
            ref = replace(ref, shape=source.shape, home=source.home)
            calls.append(turned(ref, source))
        else:
            calls.append(plain(ref, *([source] if source is not None else [])))
        slots.append(ref)
    program = place("random", calls)
    check(program)
    places = [program.places[storage_name(ref)] for ref in slots]
    assert len(set(places)) < len(places), "memory is used again"


def test_memory_is_shared_by_a_slot_that_begins_there():
    program = place("one", [plain(A), turned(B.batch(0, 1), A), turned(B, A), used(B)])
    assert program.places["a"] != program.places["b"]
