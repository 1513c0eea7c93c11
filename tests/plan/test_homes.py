"""Where the bytes of a run are: what lives on the host takes no place on the device and comes in pieces and layers,
what is updated there or made for each use, and nothing on the device that grows with depth."""

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import ranks
from ranks import LEVELS
from tiny_engines import BF16, FP8, PRECISIONS, bits, engine_of, plan_of, streams, tiny, train_steps

from llmq.backends.planned import PlannedBackend
from llmq.engine.predict import BOTH_WAYS, Rates, call_seconds, program_seconds
from llmq.model.optimizer import Hyperparameters
from llmq.model.presets import preset
from llmq.ops.seam import record
from llmq.optimizers.sgd import Sgd
from llmq.plan.memory import RESIDUAL, Memory
from llmq.plan.spec import Completions
from llmq.stores.hosted import MOST_PIECES, size_of_pieces
from llmq.stores.sharding import Sharding
from llmq.tensor import Ref, stored_bytes

CONFIG = tiny(vocab_size=300, intermediate_size=176)  # matrices of several tiles of 128 rows, the last one short
STATES = ("master", "m", "v")
ALL = (*STATES, "grad", "weight")
BLOCK = ("recompute_block",)
DEEP = Memory(BLOCK, offload=(RESIDUAL,), host=ALL)
DELAYED, WIDE = FP8["e4m3", "delayed"], replace(BF16, master="fp32", m="fp32", v="bf16")
SCALINGS = ("delayed", "current", "rowwise", "blockwise")
REMADE = Memory(persistent_quants=False)
REMADE_ON_HOST = replace(REMADE, host=(*STATES, "grad"), piece_bytes=1)
IN_PLACE = Memory(host=STATES, zero_copy=True)
RATES = Rates({"bf16": 1e15, "fp32": 1e15, "e4m3": 1e15}, memory=4e12, link=5e10)


def of_rank(level, memory, precision=BF16, size=2, config=ranks.CONFIG):
    """The plan of the first of some ranks."""
    return plan_of(precision, memory, config, sharding=Sharding(0, size, **LEVELS[level]))


def sites(plan):
    """The weights of the blocks that e4m3 matmuls read."""
    return [row for row in plan.rows if row.layer is not None and row.site and len(row.shape) == 2]


def copies(program, op):
    return [call for call in program.calls if call.op == op]


MOMENTUM = {"hyper": Hyperparameters(Sgd(momentum=0.9))}
GRADIENTS = {"config": ranks.CONFIG}
HOSTED = [
    ("master", "Master", {}),
    ("m", "Adam M", {}),
    ("v", "Adam V", {}),
    ("m", "Momentum", MOMENTUM),
    *(("grad", "Gradients", {"config": ranks.CONFIG, "sharding": Sharding(0, 2, **how)}) for how in LEVELS.values()),
]


@pytest.mark.parametrize(("space", "category", "about"), HOSTED)
@pytest.mark.parametrize("m", ["fp32", "int8"])
def test_what_is_on_the_host_takes_no_place_on_the_device(space, category, about, m):
    """The host has what the device had: of each of two ranks all, or its share."""
    precision, about = replace(WIDE, m=m), {"config": CONFIG, **about}
    plain, plan = (plan_of(precision, Memory(host=host), **about) for host in ((), (space,)))
    assert plan.table()[category] == 0 and plan.table("host")[category] == plain.table()[category] > 0
    others = plan.table().keys() - {category, "Activations"}
    assert all(plan.table()[name] == plain.table()[name] for name in others)
    moved = [ref for state in plan.moments.values() for ref in state.values() if ref.space == space]
    assert {ref.home for ref in moved} <= {"host"}


@pytest.mark.quick("bf16-streams", "bf16-residuals", "bf16-remade", "bf16-all")
@pytest.mark.sample("sweep")
@pytest.mark.parametrize(
    ("memory", "columns"),
    [
        (Memory(BLOCK, offload=streams(tiny(num_layers=10))), ["Activations"]),
        (Memory(BLOCK, offload=(RESIDUAL,)), ["Activations"]),
        (replace(REMADE, flags=BLOCK, offload=(RESIDUAL,)), ["Activations"]),
        (replace(REMADE_ON_HOST, flags=BLOCK, offload=(RESIDUAL,)), ["Activations", "Gradients", "Master", "Adam M"]),
        (replace(REMADE, flags=BLOCK, offload=(RESIDUAL,), host=("master", "weight")), ["Activations", "Weights"]),
        (DEEP, ["Activations", "Gradients", "Weights", "Master", "Adam M", "Adam V"]),
    ],
    ids=["streams", "residuals", "remade", "remade, states", "remade, streamed", "all"],
)
@pytest.mark.parametrize("precision", [BF16, DELAYED], ids=["bf16", "fp8"])
def test_nothing_grows_with_the_number_of_layers(precision, memory, columns):
    """But on the host, which has an input of each layer more."""
    plans = [plan_of(precision, memory, tiny(num_layers=depth)) for depth in (4, 8, 10)]
    for column in columns:
        assert len({plan.table()[column] for plan in plans}) == 1, column
    assert len({plan.programs["middle"].live_bytes["device"] for plan in plans}) == 1
    assert max(plan.table()["Other"] for plan in plans) < 2**16, "scales and partial sums"
    host = [plan.arena_bytes("host") for plan in plans]
    assert host[1] - host[0] == 2 * (host[2] - host[1]) > 0
    if memory.host == () and memory.offload == (RESIDUAL,):
        stream = Ref("", "activation", (2, 16, 48), "bf16")
        assert host[1] - host[0] == 4 * 2 * np.prod(stream.shape)
        plain = [plan_of(precision, replace(memory, offload=()), tiny(num_layers=depth)) for depth in (4, 8)]
        assert plain[0].arena_bytes() < plain[1].arena_bytes()


@pytest.mark.quick("fp8-e4m3-delayed-3")
@pytest.mark.sample("sweep")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("precision", ["bf16", "fp8-e4m3-delayed", "fp8-e5m2-current"])
def test_nothing_of_a_rank_grows_with_the_number_of_layers(level, precision):
    """But scales and partial sums of a few bytes; what the host has of shared states is half of all."""
    plans = [of_rank(level, DEEP, PRECISIONS[precision], config=replace(ranks.CONFIG, num_layers=n)) for n in (4, 6, 8)]
    tables = [{**plan.table(), "Other": 0, "Activations": 0} for plan in plans]
    assert tables[0] == tables[1] == tables[2]
    for name, program in plans[1].programs.items():
        scales = 2 * 1024 if plans[1].spec.precision.scaling == "current" else 0  # that are kept of two layers more
        assert 0 <= plans[2].programs[name].live_bytes["device"] - program.live_bytes["device"] <= scales, name
    assert plans[2].arena_bytes() <= 1.05 * plans[1].arena_bytes(), "but for gaps"
    host = [plan.host_bytes for plan in plans]
    assert host[0] < host[1] < host[2]


@pytest.mark.quick("bf16-*")
@pytest.mark.parametrize(("home", "memory"), [("device", Memory()), ("host", DEEP)])
@pytest.mark.parametrize("precision", ["bf16", "fp8-e4m3-delayed"])
def test_a_rank_has_less_at_every_level(precision, home, memory):
    tables = [of_rank(level, memory, PRECISIONS[precision], size=4).table(home) for level in LEVELS]
    held = {name: [table[name] for table in tables] for name in ("Gradients", "Weights", "Adam M")}
    assert held["Gradients"][0] == held["Gradients"][1] > 3 * held["Gradients"][2] == 3 * held["Gradients"][3]
    assert held["Adam M"][0] > 3 * held["Adam M"][1]
    assert held["Weights"][2] > 3 * held["Weights"][3]


@pytest.mark.parametrize(
    ("precision", "memory"), [(DELAYED, Memory(host=("master",))), *((FP8["e4m3", name], REMADE) for name in SCALINGS)]
)
def test_an_fp8_run_has_two_bytes_a_parameter_less(precision, memory):
    """Where masters leave the device what stays of a matrix are its copies, of one byte each; or these are not kept."""
    plain, plan = (plan_of(precision, one, CONFIG) for one in (Memory(), memory))
    saved = plain.table()["Weights"] - plan.table()["Weights"]
    numbers = sum(2 * np.prod(row.shape) for row in sites(plan))
    assert saved == numbers if precision is DELAYED else saved >= numbers


def test_only_what_e4m3_reads_are_quants():
    plan = plan_of(DELAYED, Memory(host=("quant",)), CONFIG)
    hosted = {name for name, ref in plan.weights.items() if ref.home == "host"}
    assert hosted == {row.name for row in sites(plan)}
    assert plan.table("host")["Weights"] == sum(2 * np.prod(plan.shape(name)) for name in hosted)


# What is fetched, and when


def test_pieces_bound_what_is_fetched_of_a_large_row():
    """The states of 7B's embedding alone are 4.4 GB; its pieces are of whole tiles, in order, and few at a time."""
    config = replace(preset("Qwen2.5-7B"), num_layers=2)
    precision = replace(BF16, m="fp32", v="fp32")
    plan = plan_of(precision, Memory(host=("m", "v")), config, scratch_bytes=PlannedBackend().scratch_bytes)
    update = plan.programs["update"]
    first = [c.numbers["first"] for c in copies(update, "adamw") if c.outputs[0].ref.name == "embed.weight"]
    assert len(first) > 60 and first == sorted(first) and all(at % (128 * config.hidden_size) == 0 for at in first)
    assert update.live_bytes["device"] <= 4 * plan.spec.memory.piece_bytes


def test_many_states_come_in_larger_pieces():
    """No more than about MOST_PIECES of them, as each takes calls of the update."""
    refs = [Ref(f"r{index}", "m", (2**14, 2**14), "fp32") for index in range(8)]
    assert size_of_pieces(refs, 2**26) == 2**26
    assert size_of_pieces(refs * 64, 2**26) == 512 * 2**30 // MOST_PIECES > 2**26


def test_a_scale_over_the_whole_is_measured_of_the_whole():
    """Rows whose copies have one are updated whole, the others in pieces."""
    for scaling, pieces in (("delayed", 2), ("current", 1), ("rowwise", 1), ("blockwise", 1)):
        plan = plan_of(FP8["e4m3", scaling], Memory(host=("m",), piece_bytes=1), CONFIG)
        calls = copies(plan.programs["update"], "adamw")
        counts = {name: sum(c.outputs[0].ref.name == name for c in calls) for name in plan.moments}
        assert counts["embed.weight"] == 3 and counts["layers.1.mlp.up.weight"] == max(1, 3 * (pieces - 1))


def test_gradients_of_a_first_micro_step_are_not_fetched():
    """But for the embedding's, to which the head has added."""
    plan = plan_of(BF16, Memory(host=("grad",)), CONFIG)
    first, middle = (
        [call.inputs[0].name for call in copies(plan.programs[name], "copy_to_device")] for name in ("first", "middle")
    )
    assert first == ["embed.weight"] and len(middle) == len(plan.grads) + 1


@pytest.mark.parametrize("level", [0, 1])
def test_only_what_a_rank_updates_is_sent_back_in_the_last_micro_step(level):
    """Its share of every sum, where states are shared out; of the tied embedding, what the head has added as well."""
    plan = of_rank(level, Memory(host=("grad",)))
    found = {
        name: sum(stored_bytes(call.written[0]) for call in copies(plan.programs[name], "copy_to_host"))
        for name in ("middle", "last")
    }
    shares = sum(plan.shards.count(row.name) * row.shape[-1] for row in plan.rows) if level else None
    whole = sum(np.prod(row.shape) for row in plan.rows)
    tied = np.prod(plan.shape("embed.weight"))
    assert found == {"middle": 2 * (whole + tied), "last": 2 * (tied + (shares or whole))}


def test_weights_that_are_gathered_go_to_the_host_once_in_a_step():
    """The first forward pass uses them as they are gathered; later ones fetch them."""
    plan = of_rank(1, Memory(host=("weight", "master")))
    layers = [row for row in plan.rows if row.layer is not None]
    found = {
        name: [len(copies(program, op)) for op in ("all_gather", "copy_to_host", "copy_to_device")]
        for name, program in plan.programs.items()
    }
    num, rows = len(layers), len(plan.rows)
    matrices = [row for row in layers if len(row.shape) == 2]
    assert found["first"][:2] == [rows, num] and found["gather"] == [rows, num, num]
    assert found["middle"][:2] == [0, 0] and found["middle"][2] >= num + len(matrices)
    assert found["first"][2] == found["middle"][2], "shares on the way forward in place of the whole"
    assert {call.lane for call in plan.programs["gather"].calls} == {"main"}


@pytest.mark.parametrize(("level", "memory"), [(1, DEEP), (3, DEEP), (3, Memory())])
def test_the_collectives_of_a_layer_stand_together(level, memory):
    """So that they are one for NCCL: what comes from the host, or goes there, is not between them."""
    plan = of_rank(level, memory, DELAYED)
    layer, ops = sum(row.layer == 0 for row in plan.rows), [call.op for call in plan.programs["only"].calls]
    gathered, reduced = (
        [len([*run]) for op, run in groupby(ops) if op == kind] for kind in ("all_gather", "reduce_scatter")
    )
    if memory is DEEP:
        assert gathered == ([1, layer, layer, 1] if level == 1 else [1, layer, layer, 2, layer, layer])
    else:  # both ways; the embedding with the first layer, the head with the last
        assert len(gathered) == 2 * plan.spec.config.num_layers and len(reduced) == plan.spec.config.num_layers + 2


# What is updated on the host, and copies that are made for each use


def test_in_place_nothing_is_fetched_and_a_row_is_updated_in_one_call():
    memory = replace(IN_PLACE, host=(*STATES, "grad"), piece_bytes=1)
    plan, copied = (plan_of(WIDE, replace(memory, zero_copy=zero), CONFIG) for zero in (True, False))
    for name in ("update", "publish", "publish_counted"):
        calls = plan.programs[name].calls
        assert not any(record(call.op).copies for call in calls) and {call.lane for call in calls} == {"main"}
        assert plan.programs[name].arena_bytes["device"] == 0 < copied.programs[name].arena_bytes["device"]
    update = copies(plan.programs["update"], "adamw")
    assert len(update) == len(plan.moments)
    homes = {ref.space: ref.home for call in update for ref in (*call.inputs, *call.written) if ref is not None}
    expected = {**dict.fromkeys((*STATES, "grad"), "host"), "weight": "device"}
    assert {space: homes[space] for space in expected} == expected
    assert plan.table("host") == copied.table("host")
    # matmuls add to gradients on the device, which come a part ahead, as without the flag
    assert plan.programs["middle"].calls == copied.programs["middle"].calls


def test_a_call_on_host_memory_is_predicted_at_the_rate_of_the_link():
    plan, copied = (
        plan_of(WIDE, replace(IN_PLACE, zero_copy=zero), CONFIG).programs["update"] for zero in (True, False)
    )
    call = copies(plan, "adamw")[0]
    hosted = sum(stored_bytes(ref) for ref in call.inputs if ref is not None and ref.home == "host")
    assert call_seconds(call, RATES, 32) == hosted / RATES.link / BOTH_WAYS
    in_place, by_copies = (program_seconds(program, RATES, 32) for program in (plan, copied))
    assert in_place < by_copies < 1.6 * in_place


def test_masters_of_the_host_of_which_copies_are_made_come_a_layer_ahead():
    plan = plan_of(DELAYED, REMADE_ON_HOST, CONFIG)
    calls = plan.programs["middle"].calls
    names = {row.name for row in sites(plan)}
    fetched = [call for call in copies(plan.programs["middle"], "copy_to_device") if call.inputs[0].space == "master"]
    assert len(fetched) == 2 * len(names) and {call.lane for call in fetched} == {"to_device"}
    made = [call for call in calls if call.op == "cast" and call.outputs[0].ref.origin.is_remade]
    assert [call.inputs[0].name.split("/")[0] for call in made].count("forward") == len(names)
    first = next(i for i, call in enumerate(calls) if call.op.startswith("linear") and call.outputs[0].ref.layer == 0)
    ahead = [call for call in calls[:first] if call in fetched]
    assert {call.inputs[0].layer for call in ahead} == {0, 1}


def test_the_update_makes_one_copy_for_its_scale_and_none_that_has_its_own():
    for scaling, count in (("delayed", 1), ("current", 1), ("rowwise", 0), ("blockwise", 0)):
        plan = plan_of(FP8["e4m3", scaling], REMADE, CONFIG)
        written = [ref for call in plan.programs["update"].calls for ref in call.written if ref.form is not None]
        made = [ref for ref in written if ref.space == "activation" and ref.form.dtype == "e4m3"]
        assert len(made) == count * len(sites(plan)) and all(ref.form.layout == "row" for ref in made)


@pytest.mark.quick("current")
@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_a_run_goes_on_with_copies_made_for_each_use_and_without(scaling):
    engines = [engine_of(plan_of(FP8["e4m3", scaling], memory, CONFIG)) for memory in (Memory(), REMADE)]
    states = []
    for engine in engines:
        train_steps(engine)
        states.append({name: array.copy() for name, array in engine.state()})
    for engine, state in zip(engines, states[::-1], strict=True):
        engine.restore(state.__getitem__)
        train_steps(engine, steps=3)
    assert bits(engines[0]) == bits(engines[1])


def test_completions_are_planned_with_copies_made_for_each_use():
    completions = Completions(2, 8, 8, packed=False)
    plan = plan_of(DELAYED, REMADE, CONFIG, completions=completions)
    assert "decode" in plan.programs and not any(ref.form for ref in plan.persistent.values() if ref.space == "weight")
