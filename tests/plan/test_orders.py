"""Every order that lanes and waits allow gives the same bits."""

import random
from dataclasses import replace

import pytest
from random_plans import AnyOrder, drawn
from tiny_engines import BF16, plan_of, result_of, streams, tiny

from llmq.plan import plan as planning
from llmq.plan.memory import Memory

LANES = planning.lanes


def on_random_lanes(seed, share=0.3):
    """The pass `lanes` after one that puts calls on lanes at random."""
    draw, real = random.Random(seed), LANES

    def lanes(calls):
        return real(
            [
                replace(call, lane=draw.choice(("to_host", "to_device", "comm"))) if draw.random() < share else call
                for call in calls
            ]
        )

    return lanes


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow if n < 6 else pytest.mark.sweep) for n in range(1, 12))]
)
def test_every_order_that_lanes_and_waits_allow_gives_the_same_bits(seed, monkeypatch):
    """Random plans, with memory poisoned before and after every slot's life."""
    precision, plain, moved = drawn(seed)
    expected = result_of(plan_of(precision, plain))
    monkeypatch.setattr(planning, "lanes", on_random_lanes(seed))
    plan = plan_of(precision, moved)
    for attempt in range(3):
        assert result_of(plan, AnyOrder(10 * seed + attempt)) == expected


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
