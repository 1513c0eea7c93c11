"""The seams carry what comes next: adapters, a quantized base, experts, fetched gradients, slots on the host.

Each is a class of tests/rooms.py, of which llmq knows nothing. It is bit-equal to the run without it, or checked
against the maths.
"""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from random_plans import AnyOrder
from rooms import TENSORWISE, TILEWISE, FetchedGrads, adapted, experts, streams
from tiny_engines import (
    BF16,
    FP8,
    FP32,
    FP64,
    PRECISIONS,
    batch,
    bits,
    engine_of,
    next_logits,
    plan_of,
    result_of,
    tiny,
    train_steps,
)  # fmt: skip

from llmq.backends.planned import PlannedBackend
from llmq.errors import UsageError
from llmq.ops.cuda.linear import planned_problem
from llmq.ops.record import call_of
from llmq.ops.seam import record
from llmq.plan import plan as planning
from llmq.plan.arena import aligned
from llmq.plan.memory import Memory
from llmq.plan.recordings import Stores
from llmq.tensor import Form, stored_bytes

LANES = planning.lanes
HELD = pytest.mark.parametrize("stored", [TENSORWISE, TILEWISE], ids=lambda form: form.scaling)
NF4 = Form("nf4", "row", "nested256")
UNTIED = tiny(tie_embeddings=False)
OFTEN = ("bf16", "fp8-e5m2-delayed")
ALL = pytest.mark.parametrize(
    "precision",
    [pytest.param(p, id=name, marks=() if name in OFTEN else pytest.mark.slow) for name, p in PRECISIONS.items()],
)


@ALL
def test_an_adapter_is_a_site(precision):
    plan, plain = plan_of(precision, sites=adapted), plan_of(precision)
    frozen = {row.name for row in plan.rows if not row.trainable}
    assert frozen == {row.name for row in plain.rows if row.site}
    assert_not_trained(plan, frozen)
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


def assert_not_trained(plan, names):
    """These rows have neither gradients nor masters nor moments."""
    for space in ("grad", "master", "m", "v"):
        assert not [name for name, ref in plan.persistent.items() if ref.space == space and ref.name in names]


@pytest.mark.sample
@pytest.mark.parametrize("config", [tiny(), UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("stored", [None, TENSORWISE, TILEWISE], ids=lambda form: form and form.scaling)
def test_the_gradients_of_an_adapter_are_those_of_finite_differences(stored, config):
    engine = engine_of(plan_of(FP64, Memory(head_chunks=2), config, sites=partial(adapted, stored=stored)))
    engine.micro_step(batch())
    rng, step = np.random.default_rng(0), 1e-5
    values = {row.name: engine.parameter(row.name) for row in engine.plan.rows}

    def loss(name, change):
        engine.load([(row, values[row.name] + (change if row.name == name else 0)) for row in engine.plan.rows])
        return engine.evaluate(batch())[0]

    for name in (f"{site}.{key}" for site in ("layers.1.attention.qkv", "layers.1.mlp.down", "head") for key in "ab"):
        engine.load([(row, values[row.name]) for row in engine.plan.rows])
        engine.micro_step(batch())
        gradient, direction = engine.gradient(name), rng.standard_normal(values[name].shape)
        slope = (loss(name, step * direction) - loss(name, -step * direction)) / (2 * step)
        assert slope == pytest.approx(float(np.sum(gradient * direction)), rel=1e-6), name


@pytest.mark.parametrize("chunks", [2, 4])
def test_an_adapter_of_the_head_works_in_chunks(chunks):
    engines = [engine_of(plan_of(FP64, Memory(head_chunks=n), sites=adapted)) for n in (1, chunks)]
    for engine in engines:
        train_steps(engine)
    (whole, cut), rows = engines, [row.name for row in engines[0].plan.rows if row.trainable]
    for name in rows:
        value = whole.gradient(name)
        assert np.linalg.norm(cut.gradient(name) - value) <= 1e-12 * np.linalg.norm(value), name
    assert whole.evaluate(batch(9)) == pytest.approx(cut.evaluate(batch(9)), rel=1e-13)
    np.testing.assert_allclose(next_logits(whole, np.arange(7)), next_logits(cut, np.arange(7)), rtol=1e-11)
    assert np.any(whole.parameter("head.b"))


@pytest.mark.sample
@HELD
@ALL
def test_a_quantized_base_is_held_once(precision, stored):
    """One byte for each of its numbers, beside scales; recomputation changes no bit."""
    sites = partial(adapted, stored=stored)
    plan = plan_of(precision, sites=sites)
    held = {row.name: row for row in plan.rows if row.stored}
    assert set(held) == {row.name for row in plan.rows if row.layer is not None and row.name.endswith("weight")}
    assert_not_trained(plan, held)
    for name, row in held.items():
        stores = [ref for ref in plan.persistent.values() if ref.space == "weight" and ref.name == name]
        assert [ref.form for ref in stores] == [stored] and stored_bytes(stores[0]) == np.prod(row.shape)
    assert not [cell for cell in plan.scales if cell.rpartition("@")[0] in held]
    assert not [name for name in plan.state() if any(row in name for row in held)]
    engine = engine_of(plan)
    before, losses = {name: engine.parameter(name) for name in held}, []
    for step in range(1, 5):
        engine.micro_step(batch())
        losses.append(engine.update(step, 1e-2).loss)
    assert losses[-1] < losses[0] - 0.1
    assert all(np.array_equal(engine.parameter(name), value) for name, value in before.items())
    block = plan_of(precision, Memory(("recompute_block",)), sites=sites)
    assert result_of(block) == result_of(plan)


@pytest.mark.sample
@HELD
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_a_quantized_base_is_the_base_that_it_stands_for(precision, stored):
    engine = engine_of(plan_of(precision, sites=partial(adapted, stored=stored)))
    other = engine_of(plan_of(precision, sites=adapted))
    other.load([(row, engine.parameter(row.name)) for row in other.plan.rows])
    assert train_steps(engine) == train_steps(other)
    assert bits(engine) == bits(other)


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("scaling", "stored"), [("blockwise", TILEWISE), ("current", TENSORWISE)])
def test_fp8_reads_a_quantized_base_as_it_is(gradient, scaling, stored):
    """With scales of the same kind it is what the site's own copies are, in both directions."""
    precision, config = FP8[gradient, scaling], tiny(hidden_size=192, head_dim=48, intermediate_size=320)
    plan, plain = (plan_of(precision, None, config, sites=partial(adapted, stored=s)) for s in (stored, None))
    assert result_of(plan)[0] == result_of(plain)[0] and result_of(plan)[2:] == result_of(plain)[2:]
    read = [ref for call in plan.programs["only"].calls for ref in call.inputs if ref is not None]
    rows = [ref for ref in read if ref.name.endswith("weight") and ref.form is not None and ref.form.layout == "row"]
    assert {(ref.space, ref.form) for ref in rows} == {("weight", stored)}


def test_what_is_cast_of_a_quantized_base_is_there_for_one_layer():
    extra = []
    for depth in (2, 4, 8):
        about = (BF16, Memory(("recompute_block",)), tiny(num_layers=depth))
        one, other = (plan_of(*about, sites=partial(adapted, stored=s)) for s in (TILEWISE, None))
        extra.append(one.programs["middle"].live_bytes["device"] - other.programs["middle"].live_bytes["device"])
    layer = sum(aligned(stored_bytes(ref)) for ref in other.weights.values() if ref.layer == 0)
    assert extra[0] == extra[1] == extra[2] <= layer


@pytest.mark.parametrize("precision", [FP8["e4m3", "delayed"], FP8["e4m3", "rowwise"]], ids=["delayed", "rowwise"])
def test_errors_of_a_quantized_base_are_not_measured(precision):
    plan = plan_of(precision, sites=partial(adapted, stored=TENSORWISE), observe=True)
    assert plan.observed and not [cell for cell in plan.observed if ".weight" in cell]
    assert engine_of(plan).observe(batch())[:, 0].all()


@pytest.mark.parametrize("scaling", ["bf16", "delayed", "rowwise", "blockwise"])
def test_a_quantized_base_can_be_planned_for_a_gpu(scaling):
    """Sites read its value, or as it is and turned; copies with scales of their own are made of the value."""
    precision = BF16 if scaling == "bf16" else FP8["e4m3", scaling]
    planned = {"scratch_bytes": PlannedBackend().scratch_bytes}
    for stored in (TENSORWISE, TILEWISE)[scaling == "blockwise" : 1 + (scaling != "delayed")]:
        plan_of(precision, sites=partial(adapted, stored=stored), **planned)
    if scaling == "delayed":
        with pytest.raises(UsageError, match="weight is stored in e4m3/row/tilewise, which no kernel casts"):
            plan_of(precision, sites=partial(adapted, stored=TILEWISE), **planned)


@pytest.mark.sample
@pytest.mark.parametrize(
    "about",
    [
        {},
        pytest.param({"trainable": False}, marks=pytest.mark.slow),
        {"trainable": False, "stored": TENSORWISE},
        pytest.param({"trainable": False, "stored": TILEWISE}, marks=pytest.mark.slow),
        pytest.param({"trainable": False, "stored": NF4}, marks=pytest.mark.slow),
    ],
    ids=["trained", "frozen", "current", "tilewise", "nf4"],
)
@ALL
def test_experts_are_entries_of_one_row(precision, about):
    """Each has the bits of a row of its own: copies, scales, moments, norm, what is drawn in the update."""
    stack, rows = (plan_of(precision, sites=experts(stacked=stacked, **about)) for stacked in (True, False))
    one, other = engine_of(stack), engine_of(rows)
    assert train_steps(one) == train_steps(other)
    assert one.evaluate(batch(9)) == other.evaluate(batch(9)) and stack.scales == rows.scales
    stacks = [row for row in stack.rows if row.stacked]
    assert len(stacks) == 4
    for row in stacks:
        for index, entry in enumerate(row.entries):
            assert one.parameter(row.name)[index].tobytes() == other.parameter(entry.name).tobytes()
    entries = {entry.name for row in stacks for entry in row.entries}
    same = {name: value for name, value in bits(other).items() if name.partition(":")[2] not in entries}
    assert same == {name: bits(one)[name] for name in same} and same


@ALL
def test_experts_can_be_planned_for_a_gpu(precision):
    """Each of their products is one that cuBLASLt is asked for with separate rows."""
    plans = [
        plan_of(precision, sites=experts(stacked=stacked), scratch_bytes=PlannedBackend().scratch_bytes)
        for stacked in (True, False)
    ]
    assert problems(plans[0]) == problems(plans[1])
    assert plans[0].table()["Workspace"] == plans[1].table()["Workspace"]


def problems(plan):
    """What `Gemms.prepare` is given, in order, by all programs."""
    calls = [call for program in plan.programs.values() for call in program.calls if record(call.op).is_linear]
    results = [(call, call.outputs[0]) for call in calls]
    return [planned_problem(call.op, out.ref, out.accumulate, call.inputs) for call, out in results if out.forms]


@ALL
def test_the_optimizer_reads_gradients_as_their_store_yields_them(precision):
    plan = plan_of(precision, stores=Stores(grads=FetchedGrads))
    assert [call.op for call in plan.programs["update"].calls].count("copy_to_device") == 2 * len(plan.grads)
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
