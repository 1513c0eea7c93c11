"""Families beyond Llama's with what moves or repeats work: in bf16 and fp8, in full and beside a base of few bits."""

import pytest
from more_families import MORE
from test_adapters import adapters, steps, warm
from tiny_engines import BF16, FP8, bits, plan_of, result_of

from llmq.model.config import read_config
from llmq.plan.memory import RESIDUAL, Memory

EVERY = pytest.mark.parametrize("name", MORE)
PRECISIONS = {"bf16": BF16, "current": FP8["e4m3", "current"], "delayed": FP8["e4m3", "delayed"]}
BLOCK = Memory(("recompute_block",))
MEMORIES = {
    "all": Memory(BLOCK.flags, offload=(RESIDUAL,), host=("master", "m", "v", "grad", "weight"), piece_bytes=1),
    "parts": Memory(("recompute_ffn", "recompute_qkv", "recompute_att")),
}


@pytest.mark.quick("*-current-gpt2")
@pytest.mark.sample
@EVERY
@pytest.mark.parametrize("kind", PRECISIONS)
def test_a_setting_changes_no_bit(kind, name):
    config, precision = read_config(MORE[name]), PRECISIONS[kind]
    plain = result_of(plan_of(precision, Memory(), config))
    for memory in MEMORIES.values():
        assert result_of(plan_of(precision, memory, config)) == plain, memory


@pytest.mark.quick("gpt2")
@pytest.mark.sample
@EVERY
def test_adapters_train_beside_a_base_of_few_bits(name):
    """As beside the values that it means, and recomputing changes no bit."""
    wide = {"n_embd": 64, "n_inner": 128} if name == "gpt2" else {"hidden_size": 64, "intermediate_size": 128}
    config = read_config({**MORE[name], **wide, "head_dim": 16})
    plan, plain = (plan_of(BF16, config=config, adapters=adapters("all", config, base=base)) for base in ("nf4", None))
    engine = warm(plan)
    losses = steps(engine)
    block = warm(plan_of(BF16, BLOCK, config, adapters=plan.spec.adapters))
    assert steps(block) == losses and bits(block) == bits(engine)
    held = {row.name: engine.parameter(row.name) for row in plan.rows if row.stored}
    assert held and steps(warm(plain, held)) == losses != steps(warm(plain))
