"""Families beyond Llama's with what moves or repeats work: in bf16 and fp8, in full and beside a base of few bits."""

from itertools import pairwise

import numpy as np
import pytest
import ranks
from more_families import MORE
from ranks import Run, on_ranks
from test_adapters import adapters, steps, warm
from tiny_engines import BF16, FP8, FP64, T, bits, engine_of, packed_batch, plan_of, result_of, train_steps

from llmq.blocks.packed import Packing
from llmq.data.batches.batch import Batch
from llmq.errors import UsageError
from llmq.model.config import read_config
from llmq.plan.memory import RESIDUAL, Memory
from llmq.tensor import IGNORED

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


@pytest.mark.quick("gemma2-current")
@pytest.mark.sample
@EVERY
@pytest.mark.parametrize("scaling", ["delayed", "current", "blockwise"])
def test_losses_in_e4m3_are_near_those_in_bf16(scaling, name):
    plans = [plan_of(precision, config=read_config(MORE[name])) for precision in (BF16, FP8["e4m3", scaling])]
    exact, rounded = (train_steps(engine_of(plan), 4, rate=1e-3) for plan in plans)
    assert exact != rounded
    np.testing.assert_allclose(rounded, exact, rtol=2e-2)


@pytest.mark.quick("gemma2")
@pytest.mark.sample
@EVERY
def test_documents_of_a_packed_row_are_those_of_rows_of_their_own(name):
    config, row = read_config(MORE[name]), packed_batch()
    packed = engine_of(plan_of(FP64, config=config, packing=Packing(5, T))).evaluate(row)
    alone, loss, count = engine_of(plan_of(FP64, config=config)), 0.0, 0
    for index, marks in enumerate(row.borders.tolist()):
        for first, stop in pairwise(dict.fromkeys(marks)):
            one = Batch(np.zeros_like(row.tokens), np.full_like(row.targets, IGNORED))
            one.tokens[0, : stop - first] = row.tokens[index, first:stop]
            one.targets[0, : stop - first] = row.targets[index, first:stop]
            found = alone.evaluate(one)
            loss, count = loss + found.loss, count + found.tokens
    assert count == packed.tokens and loss == pytest.approx(packed.loss, rel=1e-12)


@pytest.mark.quick("glm4")
@pytest.mark.sample
@EVERY
def test_shares_of_two_ranks_have_the_bits_of_the_whole(name, monkeypatch):
    monkeypatch.setattr(ranks, "CONFIG", read_config({**MORE[name], "vocab_size": 1000}))
    whole = on_ranks(Run(level=0))
    for level in (1, 2, 3):
        for found, wanted in zip(on_ranks(Run(level=level, memory=BLOCK)), whole, strict=True):
            assert found[0] == wanted[0]
            assert all(map(np.array_equal, found[1][1:], wanted[1][1:])), level
