"""The modelled time of a step: rooflines of calls, lanes beside each other, programs of a step added up."""

import pytest
from tiny_engines import BF16, FP8, plan_of, tiny

from llmq.backends.planned import PlannedBackend
from llmq.engine.predict import Rates, call_seconds, program_seconds, step_seconds, sustained
from llmq.hardware.cards import named
from llmq.model.presets import preset
from llmq.plan.memory import Memory
from llmq.tensor import stored_bytes

TOKENS = 32
SLOW_LINK = Rates({"bf16": 1e12, "fp32": 1e12}, memory=1e15, link=1.0)
SLOW_MEMORY = Rates({"bf16": 1e30, "fp32": 1e30}, memory=1.0, link=1e30)
SLOW_CORES = Rates({"bf16": 1.0, "fp32": 1.0}, memory=1e30, link=1e30)


def test_a_call_takes_the_longer_of_its_flops_and_its_bytes():
    call = next(c for c in plan_of(BF16).programs["first"].calls if c.op == "linear_forward")
    (b, t, outs), ins = call.outputs[0].ref.shape, call.inputs[0].shape[-1]
    assert call_seconds(call, SLOW_CORES, TOKENS) == 2 * b * t * outs * ins
    assert call_seconds(call, SLOW_MEMORY, TOKENS) >= 2 * (b * t * (outs + ins) + outs * ins)


def test_what_moves_between_homes_takes_the_link_alone():
    plan = plan_of(BF16, Memory(host=("m", "v")))
    states = sum(stored_bytes(state.m) + stored_bytes(state.v) for state in plan.moments.values())
    assert program_seconds(plan.programs["update"], SLOW_LINK, TOKENS) == pytest.approx(2 * states, rel=1e-6)


def test_copies_run_beside_the_work():
    """One after the other they would take the sum of both."""
    plan = plan_of(BF16, Memory(("recompute_block",), offload=("residual",)), tiny(num_layers=8))
    program = plan.programs["first"]
    rates = Rates({"bf16": 1.0, "fp32": 1.0}, memory=1.0, link=4.0)
    work, copies = (
        sum(call_seconds(call, rates, TOKENS) for call in program.calls if call.lane == lane)
        for lane in ("main", "copy")
    )
    together = program_seconds(program, rates, TOKENS)
    assert max(work, copies) <= together < work + 0.5 * copies and copies > 0


def test_a_step_is_its_micro_steps_and_the_update():
    plan = plan_of(BF16)
    one, two, four = (step_seconds(plan, SLOW_MEMORY, count) for count in (1, 2, 4))
    middle = program_seconds(plan.programs["middle"], SLOW_MEMORY, TOKENS)
    assert one < two and four == pytest.approx(two + 2 * middle)


# The table of docs/results.md: tokens/s of 524,288 tokens a step, of 7B in e4m3 262,144.
MEASURED = [
    pytest.param("Qwen2.5-0.5B", 32, 16, BF16, 169_381, marks=pytest.mark.slow),
    ("Qwen2.5-0.5B", 32, 16, FP8["e4m3", "delayed"], 220_073),
    pytest.param("Qwen2.5-1.5B", 32, 16, BF16, 61_955, marks=pytest.mark.slow),
    pytest.param("Qwen2.5-1.5B", 32, 16, FP8["e4m3", "delayed"], 91_241, marks=pytest.mark.slow),
    ("Qwen2.5-7B", 16, 32, BF16, 14_732),
    ("Qwen2.5-7B", 16, 16, FP8["e4m3", "delayed"], 24_155),
]


@pytest.mark.parametrize(("model", "batch_size", "micro_steps", "precision", "measured"), MEASURED)
def test_an_h200_is_predicted_as_it_was_measured(model, batch_size, micro_steps, precision, measured):
    sizes = {"batch_size": batch_size, "seq_len": 1024, "scratch_bytes": PlannedBackend().scratch_bytes}
    plan = plan_of(precision, Memory((), 4), preset(model), **sizes)
    rate = batch_size * 1024 * micro_steps / step_seconds(plan, sustained(named("H200")), micro_steps)
    assert rate == pytest.approx(measured, rel=0.05)
