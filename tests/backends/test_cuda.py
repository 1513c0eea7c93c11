"""The engine on the GPU: it follows the reference, graphs equal eager runs, and every bit is repeatable."""

from dataclasses import replace

import numpy as np
import pytest
from tiny_engines import (
    BF16,
    FP8,
    FP8_HEAD,
    FP32,
    batch,
    bits,
    engine_of,
    next_logits,
    packed_batch,
    plan_of,
    tiny,
    train_steps,
)

from llmq.backends import Needs
from llmq.blocks.packed import Packing
from llmq.plan.memory import ROLES, Memory

pytestmark = pytest.mark.gpu
PRECISIONS = {"fp32": FP32, "bf16": BF16, "fp8": FP8["e4m3", "delayed"], "fp8-head": FP8_HEAD}
MORE_FP8 = {"-".join(key): FP8[key] for key in FP8 if key[0] == "e5m2" or key[1] in ("rowwise", "blockwise")}
FOLLOWS = {"fp32": 1e-4, "bf16": 5e-3}  # in fp8: 2e-2
PACKING = Packing(6, 12)
CONFIG = tiny(hidden_size=64, head_dim=16, intermediate_size=96)  # what cuDNN and 16-byte accesses take


def cuda_engine(backend, precision, memory=None, config=CONFIG, **numbers):
    """A tiny engine on the GPU."""
    plan = plan_of(precision, memory, config, scratch_bytes=backend.scratch_bytes, **numbers)
    return engine_of(plan, backend=backend)


@pytest.mark.parametrize("name", PRECISIONS | MORE_FP8)
def test_training_follows_the_reference(backend, name):
    precision = (PRECISIONS | MORE_FP8)[name]
    engines = cuda_engine(backend, precision), engine_of(plan_of(precision, config=CONFIG))
    losses = [train_steps(engine, steps=6 if name in PRECISIONS else 4) for engine in engines]
    assert np.allclose(*losses, rtol=FOLLOWS.get(name, 2e-2))


@pytest.mark.parametrize("chunks", [2, 4])
def test_an_fp8_head_in_chunks_follows_the_whole(backend, chunks):
    runs = [cuda_engine(backend, FP8_HEAD, Memory(head_chunks=n), batch_size=4) for n in (1, chunks)]
    losses = []
    for run in runs:
        run.micro_step(batch(b=4))
        losses.append(run.update(1, 0.0).loss)
    assert losses[0] == losses[1]
    for row in runs[0].plan.rows:
        whole, pieces = (run.gradient(row.name).astype(np.float32) for run in runs)
        assert np.linalg.norm(whole - pieces) <= 4 * 2.0**-8 * np.linalg.norm(whole)


@pytest.mark.parametrize("packing", [None, PACKING], ids=["dense", "packed"])
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_two_runs_give_the_same_bits_eager_or_as_a_graph(backend, precision, packing):
    from llmq.backends.cuda import CudaBackend

    backends = backend, backend, CudaBackend(use_graphs=False)
    engines = [cuda_engine(one, precision, packing=packing) for one in backends]
    losses = [packed_losses(engine) if packing else train_steps(engine, steps=4) for engine in engines]
    assert losses[0] == losses[1] == losses[2]
    assert bits(engines[0]) == bits(engines[1]) == bits(engines[2])


@pytest.mark.parametrize("flag", ROLES)
@pytest.mark.parametrize("config", [CONFIG, tiny(hidden_size=64, head_dim=16, qk_norm=True, qkv_bias=False)])
def test_recompute_flags_are_bit_equal(backend, flag, config):
    engines = [cuda_engine(backend, BF16, memory, config) for memory in (Memory(), Memory((flag,)))]
    assert train_steps(engines[0]) == train_steps(engines[1])
    assert bits(engines[0]) == bits(engines[1])


def test_recompute_and_chunks_are_bit_equal_on_packed_rows(backend):
    memories = Memory(), Memory(("recompute_att",)), Memory(("recompute_block",)), Memory(attention_chunks=2)
    engines = [cuda_engine(backend, BF16, memory, packing=PACKING) for memory in memories]
    expected, *losses = [packed_losses(engine) for engine in engines]
    assert all(found == expected for found in losses)
    assert all(bits(engine) == bits(engines[0]) for engine in engines[1:])


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_a_restored_engine_continues_with_the_same_bits(backend, precision):
    engine, other = (cuda_engine(backend, precision) for _ in range(2))
    train_steps(engine)
    saved = dict(engine.state())
    train_steps(other, steps=1)
    other.restore(saved.__getitem__)
    assert train_steps(other) == train_steps(engine)
    assert bits(other) == bits(engine)


def test_a_step_that_is_not_finite_changes_nothing(backend):
    engine = cuda_engine(backend, BF16)
    train_steps(engine, steps=1)
    broken = engine.parameter("head.norm")
    broken[0] = np.inf
    engine.load([(row, broken if row.name == "head.norm" else engine.parameter(row.name)) for row in engine.plan.rows])
    before = dict(engine.state())
    engine.micro_step(batch())
    assert not engine.update(2, 1e-2).applied
    assert all(np.array_equal(value, before[name], equal_nan=True) for name, value in engine.state())


def test_the_plan_s_peak_is_what_the_driver_says(backend):
    import cupy

    plan = plan_of(BF16, Memory((), head_chunks=8), CONFIG, batch_size=64, seq_len=1024)
    cupy.get_default_memory_pool().free_all_blocks()
    before, _ = cupy.cuda.runtime.memGetInfo()
    memory = backend.memory(Needs(plan.persistent, {"device": plan.arena_bytes(), "host": 0}))
    after, _ = cupy.cuda.runtime.memGetInfo()
    del memory
    assert abs(before - after - plan.total_bytes) <= max(0.01 * plan.total_bytes, 300 * 2**20)


@pytest.mark.parametrize(("scaling", "chunks"), [(FP8_HEAD.scaling, 1), ("rowwise", 1), ("rowwise", 4)])
def test_an_fp8_head_follows_the_reference(backend, scaling, chunks):
    """In generation, of one token, and in training."""
    precision, memory = replace(FP8_HEAD, scaling=scaling), Memory(head_chunks=chunks)
    gpu = cuda_engine(backend, precision, memory, batch_size=4)
    cpu = engine_of(plan_of(precision, memory, CONFIG, batch_size=4))
    ours, reference = (next_logits(engine, batch().tokens[0]) for engine in (gpu, cpu))
    assert np.linalg.norm(ours - reference) <= 0.2 * np.linalg.norm(reference)  # bf16 differences become fp8 steps
    assert np.allclose(train_steps(gpu, steps=3), train_steps(cpu, steps=3), rtol=2e-2)


@pytest.mark.parametrize("scaling", ["rowwise", "blockwise"])
def test_scales_by_row_and_by_block_are_bit_equal_under_recompute_and_graphs(backend, scaling):
    """Widths of several 128-blocks, ragged ones among them."""
    from llmq.backends.cuda import CudaBackend

    precision, flags = FP8["e5m2", scaling], ("recompute_swiglu", "recompute_att", "recompute_block")
    config = tiny(hidden_size=192, head_dim=48, intermediate_size=336)
    plain = cuda_engine(backend, precision, config=config, seq_len=80)
    others = [cuda_engine(backend, precision, Memory((flag,)), config, seq_len=80) for flag in flags]
    others.append(cuda_engine(CudaBackend(use_graphs=False), precision, config=config, seq_len=80))
    losses = train_steps(plain, steps=3)
    for engine in others:
        assert train_steps(engine, steps=3) == losses
        assert bits(engine) == bits(plain)
    reference = engine_of(plan_of(precision, config=config, seq_len=80))
    assert np.allclose(losses, train_steps(reference, steps=3), rtol=2e-2)


def packed_losses(engine, steps=4):
    """Losses of a few optimizer steps on packed rows, each step packed otherwise."""
    losses = []
    for step in range(1, steps + 1):
        for micro_step in range(2):
            engine.micro_step(packed_batch(100 * step + micro_step), first=micro_step == 0)
        losses.append(engine.update(step, 1e-2).loss)
    return losses


@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_packed_rows_follow_the_reference(backend, precision):
    """With activations poisoned, so that rows which attention left out would show."""
    gpu = cuda_engine(backend, precision, packing=PACKING)
    cpu = engine_of(plan_of(precision, config=CONFIG, packing=PACKING))
    losses = [packed_losses(engine) for engine in (gpu, cpu)]
    assert np.allclose(*losses, rtol=1e-4 if precision is FP32 else 5e-3)
    scores = [engine.evaluate(packed_batch(7))[:2] for engine in (gpu, cpu)]
    assert np.allclose(*scores, rtol=1e-4 if precision is FP32 else 5e-3)
    prompt = batch().tokens[0, :7]
    logits = [next_logits(engine, prompt) for engine in (gpu, cpu)]
    assert np.allclose(*logits, atol=1e-3 if precision is FP32 else 0.1)
