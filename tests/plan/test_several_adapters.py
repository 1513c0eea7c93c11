"""Several adapters at once: each computes what a run of it alone does, whatever the others are."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
from tiny_engines import BF16, EVERY_FP8, FP8, FP64, VOCAB, T, arrays, bits, engine_of, plan_of, tiny

from llmq.adapters.lora import Lora
from llmq.adapters.several import Member, Several
from llmq.adapters.targets import chosen, targets
from llmq.backends.host import HostBackend
from llmq.backends.planned import PlannedBackend
from llmq.blocks.attention import Packing
from llmq.data.batches.batch import Batch
from llmq.engine.cost import Costs
from llmq.engine.engine import Engine
from llmq.engine.predict import step_seconds, sustained
from llmq.errors import UsageError
from llmq.hardware.cards import named
from llmq.model.optimizer import Hyperparameters
from llmq.model.presets import preset
from llmq.optimizers.adamw import AdamW
from llmq.plan.memory import Memory
from llmq.plan.plan import make_plan
from llmq.plan.spec import Spec

UNTIED = tiny(tie_embeddings=False)


def adapters(text="all", rank=4, config=None, alpha=6.0, **about):
    return Lora(rank, alpha, targets(chosen(text, config or tiny()), rank, alpha, rslora=False), **about)


def members(config=None):
    """Three adapters that have nothing in common: targets, ranks, rows, seeds, dropout, constants of AdamW."""
    rare = Hyperparameters(AdamW(beta_2=0.9, weight_decay=0.0), grad_clip=0.0)
    return (
        Member("a", adapters("all", 4, config), 1, 3),
        Member("b-2", adapters("q_proj,v_proj,mlp", 8, config, dropout=0.2, plus=4.0), 2, 5, rare),
        Member("c", adapters("lm_head,o_proj", 2, config), 1, 7, Hyperparameters(grad_clip=0.05)),
    )


def several(found=None, base=None):
    return Several(tuple(found or members()), base=base)


def rows(seed, count):
    """Rows of random tokens, each with a place of its own; of an odd row few are trained."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, VOCAB, (2, count, T)).astype(np.int32)
    targets[rng.random(targets.shape) < 1 / 8] = -100
    targets[1::2, 5:] = -100
    return Batch(tokens, targets, places=seed * 100 + np.arange(count))


def joined(batches):
    """One batch of several, row after row."""
    both = [None if part[0] is None else np.concatenate(part) for part in zip(*map(arrays, batches), strict=True)]
    return Batch(*both, places=np.concatenate([one.places for one in batches]))


def batches(found, step, micro_step):
    return [rows(1000 * n + 10 * step + micro_step, member.rows) for n, member in enumerate(found)]


def value_of(row):
    """The first value of a row in any plan: that of its address, and for an adapter of its name."""
    seed = zlib.crc32(f"{row.adapter} {row.address}".encode())
    values = np.random.default_rng(seed).standard_normal(row.shape) * 0.1 + (row.init == "ones")
    values[row.parts[-1].stop :] = 0
    return values


def all_at_once(precision, found, config=None, memory=None, **about):
    """An engine of all of them, and for each an engine of it alone with the same values."""
    size = sum(member.rows for member in found)
    plan = plan_of(precision, memory, config, adapters=several(found), batch_size=size, **about)
    engine = Engine(plan, HostBackend(), poison=True)
    values = {row.name: value_of(row) for row in plan.rows}
    engine.load([(row, values[row.name]) for row in plan.rows])
    alone = []
    for member in found:
        own = {row.address: values[row.name] for row in plan.rows if row.adapter in (None, member.name)}
        about |= {"adapters": member.adapters, "batch_size": member.rows, "seed": member.seed}
        one = Engine(plan_of(precision, memory, config, member.hyper, **about), HostBackend(), poison=True)
        one.load([(row, own[row.name]) for row in one.plan.rows])
        alone.append(one)
    return engine, alone


def train(engine, alone, found, rates, count=3):
    """Steps of all at once, and of each alone: the results of every step."""
    together, apart = [], [[] for _ in found]
    for step in range(1, count + 1):
        for micro_step in range(2):
            at = {"first": micro_step == 0, "last": micro_step == 1}
            given = batches(found, step, micro_step)
            if step == 1 and micro_step == 0 and engine.needs_warm_up:
                engine.warm_up(joined(given))
                for one, own in zip(alone, given, strict=True):
                    one.warm_up(own)
            engine.micro_step(joined(given), **at)
            for one, own in zip(alone, given, strict=True):
                one.micro_step(own, **at)
        together.append(engine.update(step, rates))
        for one, rate, results in zip(alone, rates, apart, strict=True):
            results.append(one.update(step, rate))
    return together, apart


RATES = (1e-2, 3e-3, 2e-2)


@pytest.mark.sample
@pytest.mark.parametrize("config", [tiny(), UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("memory", [Memory(head_chunks=4), Memory(("recompute_block",), head_chunks=1)])
def test_each_is_trained_as_it_would_be_alone(config, memory):
    found = members(config)
    engine, alone = all_at_once(FP64, found, config, memory)
    together, apart = train(engine, alone, found, RATES)
    for step, result in enumerate(together):
        for one, own in zip(result.groups, apart, strict=True):
            assert one.loss == pytest.approx(own[step].loss, rel=1e-12)
            assert one.norm == pytest.approx(own[step].norm, rel=1e-10)
            assert (one.num_tokens, one.applied) == (own[step].num_tokens, True)
        tokens = sum(one.num_tokens for one in result.groups)
        assert result.num_tokens == tokens
        assert result.loss == pytest.approx(sum(one.loss * one.num_tokens for one in result.groups) / tokens)
    for member, one in zip(found, alone, strict=True):
        mine = [row for row in engine.plan.rows if row.adapter == member.name]
        assert {row.address for row in mine} == {row.name for row in one.plan.rows if row.trainable}
        for row in mine:
            np.testing.assert_allclose(
                engine.parameter(row.name), one.parameter(row.address), rtol=1e-9, atol=1e-12, err_msg=row.name
            )
    own = rows(77, 1)
    each = list(engine.evaluate_groups(joined([own, rows(78, 2), own])).values())
    assert each[0] == pytest.approx(alone[0].evaluate(own), rel=1e-10)
    assert each[2] == pytest.approx(alone[2].evaluate(own), rel=1e-10)
    assert each[0][0] != each[2][0]


@EVERY_FP8
def test_in_every_precision_as_near_as_roundings_allow(precision):
    """Scales of fp8 copies are those of all rows together, so fp8 rounds otherwise than a run alone."""
    found = tuple(replace(member, adapters=replace(member.adapters, dropout=0.1)) for member in members())
    engine, alone = all_at_once(precision, found)
    together, apart = train(engine, alone, found, RATES)
    near = 2e-2 if precision.matmul == "e4m3" else 4e-3
    for step, result in enumerate(together):
        for one, own in zip(result.groups, apart, strict=True):
            assert one.loss == pytest.approx(own[step].loss, rel=near)
    frozen = {row.name for row in engine.plan.rows if row.adapter is None}
    written = {out.ref.name for call in engine.plan.programs["only"].calls for out in call.outputs if out is not None}
    assert not frozen & written and all(row.trainable == (row.adapter is not None) for row in engine.plan.rows)
    for flags in (("recompute_block",), ("recompute_ffn", "recompute_norm", "recompute_qkv")):
        other = Engine(
            plan_of(precision, Memory(flags), adapters=several(found), batch_size=4), HostBackend(), poison=True
        )
        other.load([(row, value_of(row)) for row in other.plan.rows])
        repeated = steps(other, found)
        assert [one.loss for one in repeated] == [one.loss for one in together] and bits(other) == bits(engine)


def steps(engine, found):
    """Results of the same steps, of all at once."""
    results = []
    for step in range(1, 4):
        for micro_step in range(2):
            given = joined(batches(found, step, micro_step))
            if step == 1 and micro_step == 0 and engine.needs_warm_up:
                engine.warm_up(given)
            engine.micro_step(given, first=micro_step == 0, last=micro_step == 1)
        results.append(engine.update(step, RATES[: len(found)]))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("precision", [BF16, FP8["e4m3", "delayed"]], ids=["bf16", "fp8"])
def test_ops_of_one_pass_have_the_rows_of_each(precision):
    """Of ranks 16 and 32 both gradients through B, and that of SwiGLU with them, come of one call for each adapter."""
    found = tuple(
        Member(name, adapters("q_proj,o_proj,mlp", rank), rows, seed)
        for name, rank, rows, seed in (("a", 16, 1, 3), ("b", 32, 3, 5))
    )
    engine, alone = all_at_once(precision, found)
    ops = [call.op for call in engine.plan.programs["only"].calls]
    assert [ops.count(op) for op in ("swiglu_low_rank_backward", "low_rank_backward", "swiglu_backward")] == [4, 12, 0]
    together, apart = train(engine, alone, found, RATES[:2])
    for step, result in enumerate(together):
        for one, own in zip(result.groups, apart, strict=True):
            assert one.loss == pytest.approx(own[step].loss, rel=2e-2)
    other = Engine(
        plan_of(precision, Memory(("recompute_block",)), adapters=several(found), batch_size=4),
        HostBackend(),
        poison=True,
    )
    other.load([(row, value_of(row)) for row in other.plan.rows])
    assert [one.loss for one in steps(other, found)] == [one.loss for one in together] and bits(other) == bits(engine)


def test_packed_rows_of_unequal_documents():
    found = members()
    packing = Packing(3, T)
    borders = np.array([[0, 5, 9, T], [0, T, T, T], [0, 2, T, T], [0, 1, 2, T]], np.int32)
    engine, alone = all_at_once(FP64, found, packing=packing)
    whole = replace(joined(batches(found, 1, 0)), borders=borders)
    engine.micro_step(whole)
    result, first = engine.update(1, RATES), 0
    for member, one, got in zip(found, alone, result.groups, strict=True):
        at = slice(first, first + member.rows)
        first += member.rows
        one.micro_step(Batch(whole.tokens[at], whole.targets[at], borders[at], whole.places[at]))
        assert got.loss == pytest.approx(one.update(1, 1e-2).loss, rel=1e-12)


def test_one_that_is_not_finite_stays_and_the_others_train():
    found = members()
    engine, alone = all_at_once(FP64, found)
    name = "layers.0.attention.qkv.adapters.a.lora_b.q_proj"
    bad = [(row, np.full(row.shape, np.inf) if row.name == name else value_of(row)) for row in engine.plan.rows]
    engine.load(bad)
    before = engine.parameter("layers.1.mlp.up.adapters.a.lora_a")
    together, apart = train(engine, alone, found, RATES, 2)
    assert [[one.applied for one in result.groups] for result in together] == [[False, True, True]] * 2
    assert all(result.applied for result in together)
    assert np.array_equal(engine.parameter("layers.1.mlp.up.adapters.a.lora_a"), before)
    for n in (1, 2):
        assert together[1].groups[n].loss == pytest.approx(apart[n][1].loss, rel=1e-12)


def test_rounding_draws_as_alone():
    """Masters of bf16 are rounded by bits of the adapter's seed and of the row's name in a run of it alone."""
    found = tuple(replace(member, adapters=replace(member.adapters, dropout=0.0)) for member in members())
    engine, alone = all_at_once(BF16, found)
    train(engine, alone, found, RATES, 1)
    for member, one in zip(found, alone, strict=True):
        for row in (row for row in engine.plan.rows if row.adapter == member.name and ".lora_b." in row.name):
            mine, own = (engine.parameter(row.name), one.parameter(row.address))
            same = np.mean(mine == own)  # the gradients have sums of another order
            assert same > 0.8, (row.name, same)


@pytest.mark.parametrize("base", ["e4m3", "nf4"])
def test_a_quantized_base(base):
    plan = plan_of(BF16, adapters=several(base=base), batch_size=4)
    assert {row.stored is not None for row in plan.rows if row.site and row.name.endswith("weight")} == {True}
    engine = engine_of(plan)
    engine.micro_step(joined(batches(members(), 1, 0)))
    assert all(one.applied for one in engine.update(1, 1e-2).groups)


@pytest.mark.slow
def test_what_it_costs_on_a_gpu_is_that_of_one():
    """No more scratch or memory than adapters and their states take, and the same arithmetic."""
    config = replace(preset("Qwen2.5-0.5B"), num_layers=6)
    one = adapters("all", 16, config)
    eight = Several(tuple(Member(f"adapter-{n + 1}", one, rows=2, seed=n) for n in range(8)))
    spec = Spec(config, FP8["e4m3", "delayed"], Memory(), Hyperparameters(), batch_size=16, seq_len=1024)
    specs = [replace(spec, adapters=each) for each in (one, eight)]
    light = [each.light_s({"bf16": 1.0, "e4m3": 2.0}) for each in specs]
    assert light[1] == pytest.approx(light[0])
    plans = [make_plan(each, PlannedBackend().scratch_bytes) for each in specs]
    assert plans[1].arena_bytes() == plans[0].arena_bytes()
    ops = [[call.op for call in plan.programs["only"].calls] for plan in plans]
    for op in ("low_rank_backward", "swiglu_low_rank_backward"):
        assert ops[1].count(op) == 8 * ops[0].count(op) > 0
    for op in ("swiglu_forward", "swiglu_backward", "attention_forward"):
        assert ops[1].count(op) == ops[0].count(op)


def test_a_step_of_it_costs_what_its_plan_says():
    rates = sustained(named("H200"))
    plan = plan_of(BF16, Memory(), adapters=several(), batch_size=4)
    cost = Costs(None, None, rates).of(plan.spec, 2)
    assert cost.num_bytes == pytest.approx(plan.total_bytes, rel=0.02)
    assert cost.seconds == pytest.approx(step_seconds(plan, rates, 2), rel=0.02)


def test_tiles_are_refused():
    with pytest.raises(UsageError, match="--seq-tiles 2: --adapters gives each row"):
        plan_of(BF16, Memory(seq_tiles=2, head_chunks=2), adapters=several(), batch_size=4)


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param(Memory(host=("m", "v", "master")), marks=pytest.mark.slow),
        Memory(host=("grad", "m"), piece_bytes=1),
    ],
)
def test_states_on_the_host_are_bit_equal(memory):
    found, precision = members(), replace(BF16, master="fp32", grad="fp32")
    engines = []
    for one in (Memory(), memory):
        engines.append(Engine(plan_of(precision, one, adapters=several(), batch_size=4), HostBackend(), poison=True))
        engines[-1].load([(row, value_of(row)) for row in engines[-1].plan.rows])
    assert steps(engines[0], found) == steps(engines[1], found)
    for row in engines[0].plan.rows:
        assert np.array_equal(engines[0].parameter(row.name), engines[1].parameter(row.name))


def test_clips_by_the_last_norm_of_its_own():
    """The norm that the next step clips by is stored for each adapter."""
    found = tuple(
        replace(member, hyper=replace(member.hyper, grad_clip=0.5, clips_by_last=True)) for member in members()
    )
    engine, alone = all_at_once(FP64, found)
    together, apart = train(engine, alone, found, RATES)
    for step, result in enumerate(together):
        for one, own in zip(result.groups, apart, strict=True):
            assert one.norm == pytest.approx(own[step].norm, rel=1e-10)
    assert {f"cell:{name}/last_norm" for name in ("a", "b-2", "c")} <= engine.plan.state().keys()
