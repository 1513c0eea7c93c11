"""Every order that lanes and waits allow gives the same bits, and calls that lead to nothing change no plan."""

import random
from dataclasses import replace

import pytest
from random_plans import AnyOrder, drawn
from tiny_engines import BF16, FP8, plan_of, result_of, streams, tiny

from llmq.ops.record import call_of
from llmq.plan import plan as planning
from llmq.plan.memory import Memory

LANES = planning.lanes


def test_a_dead_chain_is_pruned_whole(monkeypatch):
    """Calls that lead to nothing, recorded into every training program, leave the plan as it is.

    They read a value that is otherwise not kept for backward: not pruned before the fates, they would keep it.
    """
    plain, recorded = plan_of(FP8["e4m3", "delayed"]), planning.Recordings.train

    def with_chain(self, **place):
        x = next(call.outputs[0].ref for call in recorded(self, **place) if call.op == "rmsnorm_forward")
        calls = recorded(self, **place)
        for name in "abc":
            dead = replace(x, name=f"0/0.dead.{name}")
            calls.append(call_of("cast", (dead,), (x,), {}, "backward"))
            x = dead
        return calls

    monkeypatch.setattr(planning.Recordings, "train", with_chain)
    chained = plan_of(FP8["e4m3", "delayed"])
    assert chained.programs == plain.programs and chained.scales == plain.scales
    monkeypatch.setattr(planning, "prune", list)
    assert plan_of(FP8["e4m3", "delayed"]).kept != plain.kept


def on_random_lanes(seed, share=0.3):
    """The pass `lanes` behind one that puts calls on lanes at random."""
    draw, real = random.Random(seed), LANES

    def lanes(calls):
        return real(
            [
                replace(call, lane=draw.choice(("to_host", "to_device", "comm"))) if draw.random() < share else call
                for call in calls
            ]
        )

    return lanes


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_every_order_that_lanes_and_waits_allow_gives_the_same_bits(seed, monkeypatch):
    """Random plans, with memory poisoned before and after every slot's life."""
    precision, plain, moved = drawn(seed)
    expected = result_of(plan_of(precision, plain))
    monkeypatch.setattr(planning, "lanes", on_random_lanes(seed))
    plan = plan_of(precision, moved)
    for program in plan.programs.values():
        assert_no_overlap(program)
    for attempt in range(3):
        assert result_of(plan, AnyOrder(10 * seed + attempt)) == expected


def assert_no_overlap(program):
    """No two slots that live at the same time share bytes of one home, unless one was given the other's place."""
    spans = {}
    for index, names in program.births.items():
        for name in names:
            spans[name] = [index, None]
    for index, names in program.deaths.items():
        for name in names:
            spans[name][1] = index
    places = [(program.places[name], *span) for name, span in spans.items()]
    for number, (one, first, last) in enumerate(places):
        for other, begin, end in places[:number]:
            apart = one.offset + one.size <= other.offset or other.offset + other.size <= one.offset
            assert apart or one.home != other.home or last < begin or end < first


def test_a_missing_wait_is_found(monkeypatch):
    """The test above can fail: without the waits of one program, some order reads what is not there."""
    memory = Memory(offload=streams(tiny()))
    expected = result_of(plan_of(BF16))
    monkeypatch.setattr(
        planning, "lanes", lambda calls: [replace(call, waits=()) for call in on_random_lanes(1)(calls)]
    )
    plan = plan_of(BF16, memory)
    found = []
    for seed in range(5):
        try:
            found.append(result_of(plan, AnyOrder(seed)) == expected)
        except AssertionError:
            found.append(False)
    assert not all(found)
