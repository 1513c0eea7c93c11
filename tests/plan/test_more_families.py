"""Families beyond Llama's with what moves or repeats work: in bf16 and fp8, in full and beside a base of few bits."""

import pytest
from more_families import MORE
from test_adapters import adapters, steps, warm
from tiny_engines import BF16, FP8, FP64, bits, plan_of, result_of

from llmq.errors import UsageError
from llmq.model.config import read_config
from llmq.plan.memory import RESIDUAL, Memory

EVERY = pytest.mark.parametrize("name", MORE)
PRECISIONS = {"bf16": BF16, "current": FP8["e4m3", "current"], "delayed": FP8["e4m3", "delayed"]}
BLOCK = Memory(("recompute_block",))
MEMORIES = {
    "all": Memory(BLOCK.flags, offload=(RESIDUAL,), host=("master", "m", "v", "grad", "weight"), piece_bytes=1),
    "parts": Memory(("recompute_ffn", "recompute_qkv", "recompute_att")),
}
SAME = ((Memory(), *MEMORIES.values()), (Memory(seq_tiles=2), Memory(BLOCK.flags, seq_tiles=2)))
UNTILED = ("starcoder2", "gpt2")  # whose biases are trained


@pytest.mark.quick("*-current-gpt2")
@pytest.mark.sample
@EVERY
@pytest.mark.parametrize("kind", PRECISIONS)
def test_a_setting_changes_no_bit(kind, name):
    config, precision = read_config(MORE[name]), PRECISIONS[kind]
    for plain, *others in SAME[: 1 if name in UNTILED else 2]:
        result = result_of(plan_of(precision, plain, config))
        for memory in others:
            assert result_of(plan_of(precision, memory, config)) == result, memory


@pytest.mark.parametrize("name", UNTILED)
def test_biases_of_the_stream_are_trained_whole(name):
    config = read_config(MORE[name])
    for more in ({}, {"adapters": adapters("all", config, bias="all")}):
        with pytest.raises(UsageError, match=r"--seq-tiles 2: a bias of what is added .*: use --seq-tiles 1"):
            plan_of(BF16, Memory(seq_tiles=2), config, **more)
    tiled, whole = (
        plan_of(FP64, memory, config, adapters=adapters("all", config)) for memory in (SAME[1][0], SAME[0][0])
    )
    assert steps(warm(tiled)) == pytest.approx(steps(warm(whole)), rel=1e-9)


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
