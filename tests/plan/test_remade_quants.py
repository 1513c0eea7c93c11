"""e4m3 copies of weights that are made for each use: the same bits, and two bytes a parameter less."""

from dataclasses import replace

import numpy as np
import pytest
from ranks import Run, on_ranks, same
from tiny_engines import (
    BF16,
    FP8,
    FP8_HEAD,
    PRECISIONS,
    batch,
    bits,
    engine_of,
    fused_result_of,
    plan_of,
    result_of,
    tiny,
    train_steps,
)

from llmq.errors import UsageError
from llmq.model.optimizer import Hyperparameters
from llmq.options.parse import Options
from llmq.plan.memory import RESIDUAL, Memory
from llmq.plan.spec import Completions
from llmq.stores.sharding import Sharding

CONFIG = tiny(vocab_size=300, intermediate_size=176)  # matrices of several tiles of 128 rows, the last one short
STATES = ("master", "m", "v")
DELAYED = FP8["e4m3", "delayed"]
REMADE = Memory(persistent_quants=False)
KINDS = {
    "on the device": REMADE,
    "recomputed": replace(REMADE, flags=("recompute_block",), offload=(RESIDUAL,)),
    "masters on the host": replace(REMADE, host=(*STATES, "grad"), piece_bytes=1),
    "masters in place": replace(REMADE, host=STATES, zero_copy=True),
    "streamed": replace(REMADE, host=("master", "weight")),
}
USUAL = ("fp8-e4m3-current",)
SPELLED = {"train_file": "a.bin", "model": "m"}


def sites(plan):
    """The weights of the blocks that e4m3 matmuls read."""
    return [r for r in plan.rows if r.layer is not None and r.site and len(r.shape) == 2]


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(
            p,
            id=name,
            marks=() if name in USUAL else pytest.mark.slow if name == "fp8-e5m2-delayed" else pytest.mark.sweep,
        )
        for name, p in {**PRECISIONS, "wide": replace(DELAYED, master="fp32")}.items()
        if name not in ("fp32", "bf16")
    ],
)
def test_copies_made_for_each_use_are_bit_equal(precision):
    """After two micro-steps a step; scales and their statistics are those of copies that are kept."""
    expected = result_of(plan_of(precision, None, CONFIG))
    for kind, memory in KINDS.items():
        assert result_of(plan_of(precision, memory, CONFIG)) == expected, kind


def test_so_are_updates_in_backward():
    memories = (Memory(fused=True), replace(REMADE, fused=True), replace(REMADE, fused=True, host=STATES))
    hyper, precision = Hyperparameters(clips_by_last=True), FP8["e4m3", "current"]
    one, *others = (fused_result_of(plan_of(precision, memory, CONFIG, hyper)) for memory in memories)
    assert others == [one, one]


def test_the_device_has_two_bytes_a_parameter_less():
    plain, plan = (plan_of(DELAYED, memory, CONFIG) for memory in (Memory(), REMADE))
    assert plain.table()["Weights"] - plan.table()["Weights"] == sum(2 * np.prod(row.shape) for row in sites(plan))
    for scaling in ("current", "rowwise", "blockwise"):
        precision = FP8["e4m3", scaling]
        tables = [plan_of(precision, memory, CONFIG).table() for memory in (Memory(), REMADE)]
        assert tables[0]["Weights"] - tables[1]["Weights"] >= sum(2 * np.prod(row.shape) for row in sites(plan))


@pytest.mark.slow
def test_copies_of_a_layer_or_two_are_there_at_a_time():
    """Nothing grows with depth but what does without the flag."""
    for kind in ("recomputed", "masters on the host", "streamed"):
        memory = replace(KINDS[kind], flags=("recompute_block",), offload=(RESIDUAL,))
        arenas = [plan_of(DELAYED, memory, tiny(num_layers=depth)).arena_bytes() for depth in (4, 8)]
        assert arenas[0] == arenas[1], kind


def test_masters_of_the_host_come_a_layer_ahead():
    plan = plan_of(DELAYED, KINDS["masters on the host"], CONFIG)
    calls = plan.programs["middle"].calls
    names = {row.name for row in sites(plan)}
    fetched = [call for call in calls if call.op == "copy_to_device" and call.inputs[0].space == "master"]
    assert len(fetched) == 2 * len(names) and {call.lane for call in fetched} == {"to_device"}
    made = [call for call in calls if call.op == "cast" and call.outputs[0].ref.is_remade]
    assert [call.inputs[0].name.split("/")[0] for call in made].count("forward") == len(names)
    first = next(i for i, call in enumerate(calls) if call.op.startswith("linear") and call.outputs[0].ref.layer == 0)
    ahead = [call for call in calls[:first] if call in fetched]
    assert {call.inputs[0].layer for call in ahead} == {0, 1}


def test_the_update_makes_one_copy_for_its_scale_and_none_that_has_its_own():
    for scaling, count in (("delayed", 1), ("current", 1), ("rowwise", 0), ("blockwise", 0)):
        plan = plan_of(FP8["e4m3", scaling], REMADE, CONFIG)
        written = [ref for call in plan.programs["update"].calls for ref in call.written if ref.form is not None]
        copies = [ref for ref in written if ref.space == "activation" and ref.form.dtype == "e4m3"]
        assert len(copies) == count * len(sites(plan)) and all(ref.form.layout == "row" for ref in copies)


def test_errors_of_copies_are_measured_as_without():
    plain, *others = (
        engine_of(plan_of(FP8_HEAD, memory, CONFIG, observe=True)).observe(batch())
        for memory in (Memory(), REMADE, KINDS["masters on the host"])
    )
    assert all(np.array_equal(other, plain) for other in others)


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_a_run_goes_on_with_the_other_value_of_the_flag(scaling):
    plans = [plan_of(FP8["e4m3", scaling], memory, CONFIG) for memory in (Memory(), REMADE)]
    engines = [engine_of(plan) for plan in plans]
    states = []
    for engine in engines:
        train_steps(engine)
        states.append({name: array.copy() for name, array in engine.state()})
    for engine, state in zip(engines, states[::-1], strict=True):
        engine.restore(state.__getitem__)
        train_steps(engine, steps=3)
    assert bits(engines[0]) == bits(engines[1])


def test_completions_are_planned():
    completions = Completions(2, 8, 8, packed=False)
    plan = plan_of(DELAYED, REMADE, CONFIG, completions=completions)
    assert "decode" in plan.programs and not any(ref.form for ref in plan.persistent.values() if ref.space == "weight")


@pytest.mark.slow
def test_ranks_that_hold_all_masters_make_them_too():
    assert all(map(same, *(on_ranks(Run(DELAYED, 0, memory)) for memory in (None, REMADE))))


@pytest.mark.parametrize(
    ("precision", "more", "said"),
    [
        (DELAYED, {"sharding": Sharding(0, 2, states=True)}, "each of 2 GPUs has masters of its share alone"),
        (replace(FP8["e4m3", "current"], master="none"), {}, "--master-dtype none makes them for each use already"),
    ],
)
def test_what_has_no_masters_is_refused(precision, more, said):
    with pytest.raises(UsageError, match=f"--no-persistent-quants: {said}"):
        plan_of(precision, REMADE, CONFIG, **more)


def test_what_contradicts_it_is_refused():
    with pytest.raises(UsageError, match="--no-persistent-quants leaves no copies for --offload-quants to keep"):
        Options.parse({**SPELLED, "matmul_dtype": "e4m3", "offload_quants": True, "persistent_quants": False})


def test_a_run_without_copies_is_as_it_was():
    assert result_of(plan_of(BF16, REMADE, CONFIG)) == result_of(plan_of(BF16, None, CONFIG))
