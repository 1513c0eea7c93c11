"""The seams carry what comes next: an adapter site, streamed weights, states and slots on the host, each a class here.

Nothing outside this file knows of them. Each is bit-equal to the run without it, or checked against the maths.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
from rooms import HostMoments, StreamedWeights, adapted, streams
from tiny_engines import BF16, FP8, FP32, FP64, PRECISIONS, batch, bits, engine_of, plan_of, tiny, train_steps

from llmq.backends.host import HostBackend
from llmq.ops.record import call_of
from llmq.plan import plan as planning
from llmq.plan.arena import aligned
from llmq.plan.memory import Memory
from llmq.plan.recordings import Stores
from llmq.tensor import stored_bytes

LANES = planning.lanes
ALL = pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)


class AnyOrder(HostBackend):
    """Runs launches in a random order that lanes and waits allow."""

    def __init__(self, seed):
        super().__init__()
        self.random = random.Random(seed)

    def program(self, launches):
        before = super().program

        def run():
            order, done, queues = [], set(), {}
            for index, launch in enumerate(launches):
                queues.setdefault(launch.lane, []).append(index)
            while any(queues.values()):
                ready = [lane for lane, queue in queues.items() if queue and done.issuperset(launches[queue[0]].waits)]
                done.add(index := queues[self.random.choice(ready)].pop(0))
                order.append(launches[index])
            before(order)()

        return run


def result_of(plan, backend=None):
    engine = engine_of(plan, backend=backend)
    return train_steps(engine), bits(engine), engine.evaluate(batch(9)), engine.next_logits(np.arange(7)).tobytes()


@ALL
def test_an_adapter_is_a_site(precision):
    plan, plain = plan_of(precision, sites=adapted), plan_of(precision)
    frozen = {row.name for row in plan.rows if not row.trainable}
    assert frozen == {row.name for row in plain.rows if row.site and row.site != "head"}
    for space in ("grad", "master", "m", "v"):
        assert not [name for name, ref in plan.persistent.items() if ref.space == space and ref.name in frozen]
    assert all(plan.table()[name] < plain.table()[name] for name in ("Gradients", "Adam M", "Adam V"))
    engine = engine_of(plan)
    before = {name: engine.parameter(name) for name in frozen}
    losses = []
    for step in range(1, 5):
        engine.micro_step(batch())
        losses.append(engine.update(step, 1e-2).loss)
    assert losses[-1] < losses[0] - 0.1
    assert all(np.array_equal(engine.parameter(name), value) for name, value in before.items())
    block = plan_of(precision, Memory(("recompute_block",)), sites=adapted)
    assert result_of(block)[:2] == result_of(plan)[:2]


def test_the_gradients_of_an_adapter_are_those_of_finite_differences():
    engine = engine_of(plan_of(FP64, sites=adapted))
    engine.micro_step(batch())
    rng, step = np.random.default_rng(0), 1e-5
    values = {row.name: engine.parameter(row.name) for row in engine.plan.rows}

    def loss(name, change):
        engine.load([(row, values[row.name] + (change if row.name == name else 0)) for row in engine.plan.rows])
        return engine.evaluate(batch())[0]

    for name in (f"layers.1.{site}.{key}" for site in ("attention.qkv", "mlp.down") for key in "ab"):
        engine.load([(row, values[row.name]) for row in engine.plan.rows])
        engine.micro_step(batch())
        gradient, direction = engine.gradient(name), rng.standard_normal(values[name].shape)
        slope = (loss(name, step * direction) - loss(name, -step * direction)) / (2 * step)
        assert slope == pytest.approx(float(np.sum(gradient * direction)), rel=1e-6), name


@ALL
@pytest.mark.parametrize("flags", [(), ("recompute_block",)], ids=["kept", "recompute"])
def test_streamed_weights_are_bit_equal(precision, flags):
    memory = Memory(flags)
    plan = plan_of(precision, memory, stores=Stores(weights=StreamedWeights))
    assert {ref.home for ref in plan.weights.values() if ref.layer is not None} == {"host"}
    assert result_of(plan) == result_of(plan_of(precision, memory))


def test_two_layers_of_streamed_weights_are_on_the_device():
    """Their slots are all that the arena has more than that of resident weights, however many layers there are."""
    memory, streamed = Memory(("recompute_block",)), Stores(weights=StreamedWeights)
    extra = []
    for depth in (4, 8, 16):
        one, other = (plan_of(BF16, memory, tiny(num_layers=depth), stores=s) for s in (streamed, Stores()))
        extra.append(one.programs["middle"].live_bytes["device"] - other.programs["middle"].live_bytes["device"])
    layer = sum(aligned(stored_bytes(ref)) for ref in one.weights.values() if ref.layer == 0)
    assert extra[0] == extra[1] == extra[2] <= 2 * layer


@ALL
def test_moments_on_the_host_are_bit_equal(precision):
    plan = plan_of(precision, stores=Stores(moments=HostMoments))
    assert plan.table()["Adam M"] == plan.table()["Adam V"] == 0 < plan.table("host")["Adam M"]
    assert result_of(plan) == result_of(plan_of(precision))


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
    for depth in (6, 12, 24):
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

    def with_chain(self, *, last):
        x = next(call.outputs[0].ref for call in recorded(self, last=last) if call.op == "rmsnorm_forward")
        calls = recorded(self, last=last)
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
            [replace(call, lane=draw.choice(("copy", "comm"))) if draw.random() < share else call for call in calls]
        )

    return lanes


@pytest.mark.parametrize("seed", range(6))
def test_every_order_that_lanes_and_waits_allow_gives_the_same_bits(seed, monkeypatch):
    """Random plans, with memory poisoned before and after every slot's life."""
    draw = random.Random(seed)
    precision = draw.choice([FP32, BF16, *FP8.values()])
    names = sorted(name for name, form in plan_of(precision).fates.kept if name.split("/")[1][0].isdigit())
    offload = tuple(draw.sample(sorted(set(names)), 3))
    roles = draw.choice([(), ("recompute_block",), ("recompute_ffn",)])
    memory = Memory(() if any("attention.res" not in n for n in offload) and roles else roles, offload=offload)
    stores = draw.choice([Stores(), Stores(weights=StreamedWeights), Stores(moments=HostMoments)])
    expected = result_of(plan_of(precision, replace(memory, offload=())))
    monkeypatch.setattr(planning, "lanes", on_random_lanes(seed))
    plan = plan_of(precision, memory, stores=stores)
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
