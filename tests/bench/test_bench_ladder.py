"""The ladder: every op has a family, and the work of each step of a tiny plan is what it is by hand. What a device
reaches at best: the host's here, and on a GPU a share of its papers' peaks."""

import dataclasses
import time

import numpy as np
import pytest
from tiny_engines import BF16, FP8, FP32, plan_of, tiny

from llmq.bench import ladder as bench_ladder
from llmq.bench.ladder import Ceilings, Ladder, Rung, family, ladder, measure_ceilings, work_of, written
from llmq.engine.measure import Speed, TimedCall
from llmq.hardware import cards as gpus
from llmq.hardware import device
from llmq.ops.seam import record
from llmq.plan.memory import Memory

B, T, C, F, HQ, HKV, HD, L = 2, 16, 48, 64, 4, 2, 12, 2
M, QKV, VP = B * T, (HQ + 2 * HKV) * HD, 128
USED = 20  # different tokens
CEILINGS = Ceilings({"fp32": 1e9, "bf16": 2e9, "e4m3": 4e9}, 1e8)


def works(plan, program="middle"):
    """(op, name of what is written first, its work) of every call."""
    p = plan.programs[program]
    return [(call.op, written(call), work_of(call, p.places, USED)) for call in p.calls]


def of(plan, op, part="", program="middle"):
    """The work of the calls of an op that write something with `part` in its name."""
    return [work for name, output, work in works(plan, program) if name == op and part in output]


def test_every_op_of_a_step_belongs_to_a_family():
    named = {}
    for name in ("middle", "update"):
        for op, output, _ in works(plan_of(FP32, config=tiny(qk_norm=True)), name):
            named.setdefault(family(op, output), set()).add(op)
    assert named["head"] == {"linear_forward", "linear_dgrad", "linear_wgrad"}
    assert named["linears wgrad"] == {"linear_wgrad", "bias_backward"}
    assert named["optimizer"] == {"sum_squares", "grad_scale", "adamw"}
    assert named["embedding"] == {"embedding_forward", "embedding_backward"}
    fp8 = plan_of(FP8["e4m3", "current"])
    assert {family(op, output) for op, output, _ in works(fp8) if op in ("cast", "amax_scale")} == {"quantize"}


def test_products_by_hand():
    plan = plan_of(FP32, Memory(head_chunks=2))
    assert plan.rows[0].shape == (VP, C)
    per_layer = 2 * M * (C * QKV + HQ * HD * C + C * 2 * F + F * C)
    head = 2 * M * VP * C
    for op in ("linear_forward", "linear_dgrad", "linear_wgrad"):
        found = of(plan, op)
        assert sum(work.flops for work in found) == L * per_layer + head
        assert {work.dtype for work in found} == {"fp32"}
    seen = sum(range(1, T + 1))  # keys of all queries of a sequence and head: itself and those before
    assert [w.flops for w in of(plan, "attention_forward")] == [2 * 2 * B * HQ * HD * seen] * L
    assert [w.flops for w in of(plan, "attention_backward")] == [5 * 2 * B * HQ * HD * seen] * L
    assert {w.flops for op, _, w in works(plan) if not record(op).products} == {0}
    windows = of(plan_of(FP32, config=tiny(windows=(4, None))), "attention_forward")  # hide keys
    assert [w.flops for w in windows] == [4 * B * HQ * HD * n for n in (1 + 2 + 3 + 4 * (T - 3), seen)]


def test_bytes_by_hand():
    plan = plan_of(FP32)
    row, stat = 4 * C, 4  # bytes of a row of the stream, of a statistic
    assert of(plan, "rmsnorm_forward")[0].num_bytes == M * (2 * row + stat) + row
    # d_x, d_res, res, rstd and the weight are read, d_out is written, the weight's gradient is added to
    head, *blocks = of(plan, "rmsnorm_backward")
    assert blocks[0].num_bytes == M * (4 * row + stat) + row + 2 * row
    assert head.num_bytes == blocks[0].num_bytes - M * row  # the stream ends here: there is no d_res
    assert of(plan, "swiglu_forward")[0].num_bytes == M * 4 * 3 * F
    assert of(plan, "swiglu_backward")[0].num_bytes == M * 4 * 5 * F
    (down,) = of(plan, "linear_forward", "1.attention.res")  # act, weight, residual; the sum is written
    assert down.num_bytes == 4 * (M * F + C * F + 2 * M * C)
    up_grad = of(plan, "linear_wgrad", "mlp.up")[0]  # added to
    assert up_grad.num_bytes == 4 * (M * 2 * F + M * C + 2 * 2 * F * C)
    assert of(plan, "attention_forward")[0].num_bytes == 4 * M * (QKV + HQ * HD + HQ)
    assert of(plan, "cross_entropy")[0].num_bytes == 4 * (2 * M * VP + M) + 2 * 4 * M


def test_bytes_that_an_op_does_not_touch():
    plan = plan_of(FP32)
    assert of(plan, "embedding_forward")[0].num_bytes == 4 * (M + USED * C + M * C)
    assert of(plan, "embedding_backward")[0].num_bytes == 4 * (M + 2 * USED * C + M * C)
    tables = 4 * (T * HD + M)
    forward, backward = of(plan, "rope_forward")[0], of(plan, "rope_backward")[0]
    turned, value = 4 * M * (HQ + HKV) * HD, 4 * M * HKV * HD
    assert forward.num_bytes == 2 * turned + tables, "in place, value heads stay where they are"
    # the bias's column sums are made of value heads, too: 32 rows fit in one part
    assert backward.num_bytes == 2 * turned + value + tables + 4 * QKV
    kept = plan_of(FP32, config=tiny(qk_norm=True, qkv_bias=False))
    assert of(kept, "qk_norm_backward")[0].num_bytes == (
        4 * (3 * M * QKV + M * (HQ + HKV)) - value + 2 * 4 * HD + 2 * 2 * 4 * HD
    )


def test_an_optimizer_step_by_hand():
    plan = plan_of(FP32, config=tiny(intermediate_size=96))  # 192 rows of gate and up
    numbers = sum(row.shape[0] * (row.shape[1] if row.shape[1:] else 1) for row in plan.rows)
    # master, m, v and gradient are read, the first three written; the weight is its own master; four cells each
    assert sum(w.num_bytes for w in of(plan, "adamw", program="update")) == 7 * 4 * numbers + 16 * len(plan.rows)
    tiles = sum(-(-row.shape[0] // 128) if row.shape[1:] else 1 for row in plan.rows)
    assert sum(w.num_bytes for w in of(plan, "sum_squares", program="update")) == 4 * numbers + 4 * tiles
    wide = plan_of(dataclasses.replace(BF16, master="fp32"), config=plan.spec.config)
    own = 4 * 2 + 2 * 2 * 2 + 2 + 2  # master, both moments, gradient, and the weight's copy
    assert sum(w.num_bytes for w in of(wide, "adamw", program="update")) == own * numbers + 16 * len(plan.rows)


@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
def test_fp8_products_count_at_the_rate_of_e4m3_and_move_single_bytes(gradient):
    plan = plan_of(FP8[gradient, "delayed"])
    up = of(plan, "linear_forward", "gate_up")[0]
    assert (up.dtype, up.num_bytes) == ("e4m3", M * C + 2 * F * C + 2 * M * 2 * F)
    assert {w.dtype for w in of(plan, "linear_dgrad", "d_layers")} <= {"e4m3"}
    assert of(plan, "linear_dgrad")[-1].dtype == "e4m3"
    assert of(plan, "linear_forward", "logits")[0].dtype == "bf16"
    own = plan_of(dataclasses.replace(FP8[gradient, "delayed"], scaling="rowwise"))
    scales = 4 * (M + 2 * F)  # that a copy owns are moved with it: one per token, and per output
    assert of(own, "linear_forward", "gate_up")[0].num_bytes == up.num_bytes + scales
    assert {family(op, output) for op, output, _ in works(own) if op == "quantize"} == {"quantize"}


def test_a_rung_is_the_sum_of_its_calls_and_its_rooflines():
    plan = plan_of(FP32)
    calls = [TimedCall(name, i, 2.0) for name in ("middle", "update") for i in range(len(plan.programs[name].calls))]
    found = ladder(Speed(plan, 4 * M, (4.0,), 0.0, (), tuple(calls), (), 0), CEILINGS)
    rungs = {rung.family: rung for rung in found.rungs}
    forward = rungs["linears forward"]
    assert (forward.calls, forward.ms) == (4 * L, 8.0 * L)
    maps = [w for op, output, w in works(plan) if op == "linear_forward" and "logits" not in output]
    by_hand = [max(w.flops / 1e9, w.num_bytes / 1e8) for w in maps]
    assert forward.roofline_ms == pytest.approx(1e3 * sum(by_hand))
    # a quarter of the update belongs to each of the four micro-batches of a step
    updates = [w for op, output, w in works(plan, "update") if family(op, output) == "optimizer"]
    optimizer = rungs["optimizer"]
    assert optimizer.ms == 2.0 * len(updates) / 4
    assert optimizer.roofline_ms == pytest.approx(1e3 * sum(w.num_bytes for w in updates) / 1e8 / 4)
    assert [rung.ms for rung in found.rungs] == sorted((rung.ms for rung in found.rungs), reverse=True)
    assert found.gaps_ms == pytest.approx(1000.0 - sum(rung.ms for rung in found.rungs))
    assert found.share == pytest.approx(sum(rung.roofline_ms for rung in found.rungs) / 1000)


def test_ops_that_take_longer_alone_than_together_overlap():
    assert Ladder((Rung("norms", 1, 5.0, 2.0, 0, 0), Rung("rope", 1, 6.0, 2.0, 0, 0)), 10.0).gaps_ms == -1.0


def test_the_hosts_copy_counts_both_directions(monkeypatch):
    monkeypatch.setattr(device, "measured_peak", {"fp32": 3e9}.get)
    times = iter(range(100))
    monkeypatch.setattr(bench_ladder.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(np, "copyto", lambda target, source: target.shape == source.shape or pytest.fail("shapes"))
    found = measure_ceilings("cpu", ["bf16", "e4m3", "bf16"])
    assert found.flops == {"bf16": 3e9, "e4m3": 3e9} and found.bytes_per_s == bench_ladder.HOST_COPY_BYTES


@pytest.mark.gpu
def test_a_gpu_reaches_a_good_part_of_its_peak_in_a_few_seconds():
    where = device.pick("cuda")
    dtypes = ["bf16", "e4m3"] if where.capability >= device.OLDEST_FP8 else ["bf16"]
    measure_ceilings("cuda", dtypes)  # chooses algorithms
    start = time.perf_counter()
    found = measure_ceilings("cuda", dtypes)
    assert time.perf_counter() - start < 5 and set(found.flops) == set(dtypes)
    if where.card in (gpus.named("H100 SXM"), gpus.named("H200")):
        assert all(0.5 < found.flops[dtype] / where.card.peaks[dtype] < 1 for dtype in dtypes)
        assert 2e12 < found.bytes_per_s < 4.9e12
