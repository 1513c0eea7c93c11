"""Updates that read and write host memory where it is: nothing is fetched, and no bit changes."""

from dataclasses import replace

import pytest
from ranks import Run, on_ranks, same
from tiny_engines import BF16, FP8, PRECISIONS, fused_result_of, plan_of, result_of, tiny

from llmq.engine.cost import Costs
from llmq.engine.predict import BOTH_WAYS, Rates, call_seconds, program_seconds
from llmq.model.optimizer import Hyperparameters
from llmq.ops.seam import record
from llmq.optimizers import adamw
from llmq.options.maths import MemoryOptions
from llmq.plan import memory as memories
from llmq.plan.memory import RESIDUAL, Memory
from llmq.tensor import stored_bytes

CONFIG = tiny(vocab_size=300, intermediate_size=176)  # matrices of several tiles of 128 rows, the last one short
STATES = ("master", "m", "v")
WIDE = replace(BF16, master="fp32", m="fp32", v="bf16")
EIGHT = replace(BF16, m="int8", v="e4m3", master="fp32")
USUAL = ("bf16", "fp8-e5m2-delayed")
KINDS = {
    "states": Memory(host=STATES, zero_copy=True),
    "moments": Memory(host=("m", "v"), zero_copy=True),
    "states and gradients": Memory(host=(*STATES, "grad"), zero_copy=True),
    "everything": Memory(
        ("recompute_block",), offload=(RESIDUAL,), host=(*STATES, "grad", "weight"), zero_copy=True, write_combined=True
    ),
}
SPELLED = {"train_file": "a.bin", "model": "m"}


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param(p, id=name, marks=() if name in USUAL else pytest.mark.sweep)
        for name, p in {**PRECISIONS, "wide": WIDE, "8 bits": EIGHT}.items()
    ],
)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.sweep if "and" not in k else ()) for k in KINDS])
def test_an_update_in_host_memory_is_bit_equal(precision, kind):
    assert result_of(plan_of(precision, KINDS[kind], CONFIG)) == result_of(plan_of(precision, None, CONFIG))


@pytest.mark.parametrize("precision", [WIDE, EIGHT, FP8["e4m3", "current"]], ids=["wide", "8 bits", "fp8"])
def test_so_is_one_in_backward(precision):
    hyper = Hyperparameters(clips_by_last=True)
    plans = (plan_of(precision, replace(m, fused=True), CONFIG, hyper) for m in (Memory(), KINDS["states"]))
    plain, found = map(fused_result_of, plans)
    assert plain == found


def test_nothing_is_fetched_and_a_row_is_updated_in_one_call():
    memory = replace(KINDS["states and gradients"], piece_bytes=1)
    plan, copied = (plan_of(WIDE, replace(memory, zero_copy=zero), CONFIG) for zero in (True, False))
    for name in ("update", "publish", "publish_counted"):
        calls = plan.programs[name].calls
        assert not any(record(call.op).copies for call in calls) and {call.lane for call in calls} == {"main"}
        assert plan.programs[name].arena_bytes["device"] == 0 < copied.programs[name].arena_bytes["device"]
    update = [call for call in plan.programs["update"].calls if call.op == "adamw"]
    assert len(update) == len(plan.moments)
    homes = {ref.space: ref.home for call in update for ref in (*call.inputs, *call.written) if ref is not None}
    assert {space: homes[space] for space in (*STATES, "grad", "weight")} == {
        **dict.fromkeys((*STATES, "grad"), "host"),
        "weight": "device",
    }
    assert plan.table("host") == copied.table("host")


def test_matmuls_add_to_gradients_on_the_device():
    """Which come a part ahead, as without the flag."""
    plan, copied = (
        plan_of(BF16, Memory(host=("grad",), zero_copy=zero), CONFIG).programs["middle"] for zero in (True, False)
    )
    assert plan.calls == copied.calls


def test_shares_of_ranks_are_updated_in_host_memory_too():
    assert all(map(same, *(on_ranks(Run(WIDE, 1, memory)) for memory in (None, KINDS["states"]))))


def test_a_call_on_host_memory_is_predicted_at_the_rate_of_the_link():
    rates = Rates({"bf16": 1e15, "fp32": 1e15, "e4m3": 1e15}, memory=4e12, link=5e10)
    plan, copied = (
        plan_of(WIDE, replace(KINDS["states"], zero_copy=zero), CONFIG).programs["update"] for zero in (True, False)
    )
    call = next(call for call in plan.calls if call.op == "adamw")
    hosted = sum(stored_bytes(ref) for ref in call.inputs if ref is not None and ref.home == "host")
    assert call_seconds(call, rates, 32) == hosted / rates.link / BOTH_WAYS
    in_place, by_copies = (program_seconds(program, rates, 32) for program in (plan, copied))
    assert in_place < by_copies < 1.6 * in_place


def test_few_layers_know_of_it():
    """The update of many layers, by plans of a few, is that of the run."""
    rates = Rates({"bf16": 1e15, "fp32": 1e15, "e4m3": 1e15}, memory=4e12, link=5e10)
    plans = [plan_of(WIDE, replace(KINDS["states"], zero_copy=zero), tiny(num_layers=12)) for zero in (True, False)]
    costs = Costs(lambda call: 0, lambda call: 0, rates)
    for plan in plans:
        found = costs.of(plan.spec, 1)
        seconds = sum(program_seconds(plan.programs[name], rates, 32) for name in ("only", "update"))
        assert found.seconds == pytest.approx(seconds, rel=0.02)
        assert found.host_bytes == pytest.approx(plan.host_bytes, rel=0.02)


def test_options_become_a_policy():
    options = MemoryOptions(offload_optimizer=True, use_zero_copy=True, write_combined=True)
    found = memories.resolve(options, adamw.DEFAULT, batch_size=2, seq_len=16, logit_bytes=1)
    assert found == Memory(host=STATES, zero_copy=True, write_combined=True)
