"""The modelled time of a step: rooflines of calls, lanes beside each other, programs of a step added up."""

from dataclasses import replace

import pytest
from tiny_engines import BF16, FP8, plan_of, spec_of, tiny

from llmq.engine.predict import BOTH_WAYS, Rates, call_seconds, program_seconds, step_seconds
from llmq.hardware.cards import named
from llmq.plan.levels import at_level
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.stores.sharding import Sharding
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


def test_what_moves_between_homes_takes_the_link_alone_in_both_directions_at_once():
    plan = plan_of(BF16, Memory(host=("m", "v")))
    states = sum(stored_bytes(state["m"]) + stored_bytes(state["v"]) for state in plan.moments.values())
    assert states / BOTH_WAYS < program_seconds(plan.programs["update"], SLOW_LINK, TOKENS) < 1.5 * states
    copies = [call for call in plan.programs["update"].calls if call.lane != "main"]
    assert sum(call_seconds(call, SLOW_LINK, TOKENS) for call in copies) == pytest.approx(2 * states, rel=1e-6)


def test_copies_run_beside_the_work():
    """One after the other they would take the sum of both."""
    plan = plan_of(BF16, Memory(("recompute_block",), offload=("residual",)), tiny(num_layers=8))
    program = plan.programs["first"]
    rates = Rates({"bf16": 1.0, "fp32": 1.0}, memory=1.0, link=4.0)
    work, copies = (
        sum(call_seconds(call, rates, TOKENS) for call in program.calls if call.lane in lanes)
        for lanes in (("main",), ("to_host", "to_device"))
    )
    together = program_seconds(program, rates, TOKENS)
    assert max(work, copies) <= together < work + 0.5 * copies and copies > 0


def test_a_step_is_its_micro_steps_and_the_update():
    plan = plan_of(BF16)
    one, two, four = (step_seconds(plan, SLOW_MEMORY, count) for count in (1, 2, 4))
    middle = program_seconds(plan.programs["middle"], SLOW_MEMORY, TOKENS)
    assert one < two and four == pytest.approx(two + 2 * middle)


def seconds_of(name, rates, spec=BF16, **sizes):
    """Seconds of the first call of an op in a program of a micro-step."""
    call = next(c for c in plan_of(spec, **sizes).programs["first"].calls if c.op == name)
    return call_seconds(call, rates, TOKENS)


def test_every_call_takes_the_time_of_a_node_too():
    without, more = (replace(SLOW_CORES, node=node) for node in (0.0, 3.0))
    for name in ("linear_forward", "rmsnorm_backward", "attention_backward"):
        assert seconds_of(name, more) == pytest.approx(seconds_of(name, without) + 3.0)


def test_products_of_few_tiles_leave_multiprocessors_idle():
    """The output for 32 tokens and 48 channels is one tile; a sum over 8192 channels is cut into two pieces."""
    assert seconds_of("linear_forward", replace(SLOW_CORES, num_sms=8)) == 8 * seconds_of("linear_forward", SLOW_CORES)
    wide = plan_of(BF16, config=tiny(intermediate_size=4096)).programs["first"].calls
    (deep, *_) = [c for c in wide if c.op == "linear_dgrad" and c.inputs[0].shape[-1] == 8192]
    one, two, four = (call_seconds(deep, replace(SLOW_CORES, num_sms=sms), TOKENS) for sms in (1, 2, 4))
    assert one == two == four / 2


def test_the_last_waves_of_attention_weigh_where_there_are_few():
    """Four blocks of one multiprocessor are four waves, and two more; of four, one wave and two more."""
    rates = replace(SLOW_CORES, attention={"attention backward": (1.0, 0.0)})
    one, four = (seconds_of("attention_backward", replace(rates, num_sms=sms)) for sms in (1, 4))
    heads = tiny().num_heads * 2
    assert four / one == pytest.approx((1 + 2 * 4 / heads) / (1 + 2 / heads))


@pytest.mark.parametrize(("scaling", "share"), [("rowwise", 0.94), ("blockwise", 0.82)])
def test_scales_of_rows_and_blocks_cost_rate(scaling, share):
    cores = Rates({"bf16": 1e-3, "fp32": 1e-3, "e4m3": 1e-3}, memory=1e30, link=1.0)
    tensor, other = (seconds_of("linear_forward", cores, FP8["e4m3", each]) for each in ("delayed", scaling))
    assert tensor / other == pytest.approx(share)


def test_ranks_send_what_the_others_lack():
    """Of two, half of each tensor, over the link between cards."""
    spec = replace(spec_of(BF16), sharding=at_level(Sharding(0, 2), 1))
    calls = [c for program in make_plan(spec).programs.values() for c in program.calls if c.op == "reduce_scatter"]
    rates = replace(SLOW_MEMORY, peers=1.0)
    for call in calls:
        assert call_seconds(call, rates, TOKENS) == stored_bytes(call.inputs[0]) * 0.5
    assert calls and named("H200").peer_rate == 450e9 and named("RTX 4090").peer_rate is None
