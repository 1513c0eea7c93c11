"""A family's activation: calls, slots and rows of MLPs with and without a gate, and what runs of them compute."""

from dataclasses import replace

import pytest
from tiny_engines import BF16, FP64, B, T, assert_slopes, engine_of, plan_of, result_of

from llmq.blocks.mlp import Glu, Plain
from llmq.model.config import FAMILIES, ModelConfig
from llmq.model.families import Family
from llmq.model.wiring import Names, Wiring
from llmq.plan.memory import Memory

OTHERS = {"geglu": Glu("gelu_tanh"), "gelu": Plain("gelu"), "relu2": Plain("relu2")}


@pytest.fixture
def with_activation(monkeypatch):
    """Gives all models an activation of two tensors in files, or of one."""

    def given(activation):
        class Other(Family):
            def activation(self, config):
                return activation

        usual = FAMILIES["Qwen2ForCausalLM"]
        up = ("mlp.gate_proj", "mlp.up_proj") if activation.maps == 2 else ("mlp.c_fc",)
        made = Other(usual.model_type, usual.defaults, usual.facts, usual.takes, Wiring(replace(Names(), up=up)))
        monkeypatch.setattr(ModelConfig, "family", made)

    return given


def mlp_calls(plan):
    """Those of the activation in a step."""
    calls = plan.programs["only"].calls
    return [(call.op, call.numbers) for call in calls if call.op.startswith(("swiglu", "activation"))]


def test_calls_of_swiglu_have_no_numbers_and_others_name_their_activation(with_activation):
    assert set(map(str, mlp_calls(plan_of()))) == {"('swiglu_forward', {})", "('swiglu_backward', {})"}
    with_activation(OTHERS["geglu"])
    assert {numbers["activation"] for _, numbers in mlp_calls(plan_of())} == {"gelu_tanh"}
    with_activation(OTHERS["gelu"])
    plan = plan_of()
    assert {op for op, _ in mlp_calls(plan)} == {"activation_forward", "activation_backward"}
    f, (up,) = plan.spec.config.intermediate_size, [row for row in plan.rows if row.name == "layers.1.mlp.up.weight"]
    assert up.shape == (f, 48) and [part.name for part in up.parts] == ["model.layers.1.mlp.c_fc.weight"]
    written = [call.outputs[0].ref.shape for call in plan.programs["only"].calls if call.op == "activation_backward"]
    assert written == [(B, T, f)] * 2


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_are_those_of_finite_differences(name, with_activation):
    with_activation(OTHERS[name])
    assert_slopes(engine_of(plan_of(FP64)), "layers.0.mlp.up.weight", "layers.1.mlp.norm")


@pytest.mark.parametrize("name", ["geglu", "gelu"])
def test_recomputing_changes_no_bit(name, with_activation):
    with_activation(OTHERS[name])
    plain = result_of(plan_of(BF16))
    for flags in (("recompute_swiglu",), ("recompute_ffn",)):
        assert result_of(plan_of(BF16, Memory(flags))) == plain
