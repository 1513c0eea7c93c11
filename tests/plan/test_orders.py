"""Slots on the host, calls that lead to nothing, and every order that lanes and waits allow: the same bits."""

import random
from dataclasses import replace

import pytest
from random_plans import AnyOrder
from tiny_engines import BF16, FP8, FP32, PRECISIONS, plan_of, result_of, streams, tiny

from llmq.ops.record import call_of
from llmq.plan import plan as planning
from llmq.plan.memory import Memory

LANES = planning.lanes
OFTEN = ("bf16", "fp8-e5m2-delayed")
ALL = pytest.mark.parametrize(
    "precision",
    [pytest.param(p, id=name, marks=() if name in OFTEN else pytest.mark.slow) for name, p in PRECISIONS.items()],
)


@ALL
def test_slots_that_wait_on_the_host_are_bit_equal(precision):
    names = (*streams(tiny()), "0/0.mlp.gate_up", "0/1.mlp.x", "0/1.mlp.act", "0/0.attention.att")
    plan, plain = plan_of(precision, Memory(offload=names)), plan_of(precision)
    assert plan.arena_bytes("host") > 0 and sum(plan.kept.values()) < sum(plain.kept.values())
    assert result_of(plan) == result_of(plain)
    block = Memory(("recompute_block",), offload=streams(tiny()))
    assert result_of(plan_of(precision, block)) == result_of(plain)


@pytest.mark.parametrize("precision", [BF16, FP8["e4m3", "delayed"]])
def test_offloaded_streams_leave_a_peak_that_does_not_grow_with_depth(precision):
    peaks = []
    for depth in (4, 7, 10):
        config = tiny(num_layers=depth)
        memory = Memory(("recompute_block",), offload=streams(config))
        program = plan_of(precision, memory, config).programs["middle"]
        peaks.append((program.live_bytes["device"], program.arena_bytes["device"]))
    assert peaks[0] == peaks[1] == peaks[2]


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
    draw = random.Random(seed)
    precision = draw.choice([FP32, BF16, *FP8.values()])
    names = sorted(name for name, form in plan_of(precision).fates.kept if name.split("/")[1][0].isdigit())
    offload = tuple(draw.sample(sorted(set(names)), 3))
    roles = draw.choice([(), ("recompute_block",), ("recompute_ffn",)])
    memory = Memory(() if any("attention.res" not in n for n in offload) and roles else roles, offload=offload)
    expected = result_of(plan_of(precision, replace(memory, offload=())))
    hosted = draw.choice([(), ("m", "v"), ("weight", "master"), ("grad",), ("master", "m", "v", "grad", "weight")])
    memory = replace(memory, host=hosted, piece_bytes=1)
    monkeypatch.setattr(planning, "lanes", on_random_lanes(seed))
    plan = plan_of(precision, memory)
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
