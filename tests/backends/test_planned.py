"""A GPU that is not here: plans know its scratch, and what its kernels do not take."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
from tiny_engines import BF16, FP8, FP32, FP64, plan_of, tiny

from llmq.backends.opening import open_backend
from llmq.backends.planned import PlannedBackend
from llmq.blocks.packed import Packing
from llmq.errors import UsageError
from llmq.hardware.device import backend_settings, pick_device
from llmq.model.presets import preset
from llmq.options.run import SystemOptions
from llmq.plan.memory import Memory
from llmq.plan.spec import Regularization

GIB = 2**30


def workspace(config, deterministic=True, **shape):
    """Workspace of a bf16 plan for a GPU."""
    backend = open_backend("planned", deterministic=deterministic)
    return plan_of(BF16, Memory((), 8), config, **shape, scratch_bytes=backend.scratch_bytes).table()["Workspace"]


@pytest.mark.slow
def test_the_workspace_is_about_what_was_measured():
    """On an H200 with cuDNN 9.19: 252 MiB at 8x1024 of the 0.5B model, 1.0 GiB at 32x1024."""
    config = preset("Qwen2.5-0.5B")
    assert workspace(config, batch_size=8, seq_len=1024) == pytest.approx(252 * 2**20, rel=0.15)
    assert workspace(config, batch_size=32, seq_len=1024) == pytest.approx(GIB, rel=0.15)
    assert workspace(config, False, batch_size=32, seq_len=1024) < 0.3 * GIB


@pytest.mark.parametrize("packing", [None, Packing(6, 12)], ids=["dense", "packed"])
def test_attention_in_fp32_takes_no_workspace_of_cudnn(packing):
    """Our own kernels have one f32 sum for every query and head, whether or not bits must repeat."""
    programs = plan_of(FP32, packing=packing).programs.values()
    steps = [step for program in programs for step in program.calls if step.op.startswith("attention_")]
    assert {step.op for step in steps} == {"attention_forward", "attention_backward"}
    for step in steps:
        b, t, heads = 2, 16, 4
        for deterministic in (True, False):
            found = PlannedBackend(deterministic=deterministic).scratch_bytes(step)
            assert found == 4 * b * t * heads * (step.op == "attention_backward")


CURRENT = "use --fp8-scaling current, or --matmul-dtype bf16"
WIDER = "use --model-dtype bf16 or --device cpu"
FP8_IN_FP32 = replace(FP8["e4m3", "delayed"], model="fp32", master="fp32")
IN_8_BITS = replace(BF16, m="int8", v="e4m3")
REFUSED = {
    "rope, fp32": (FP8_IN_FP32, {"head_dim": 18}, f"head_dim 18: half of it is odd.* {CURRENT}"),
    "rope, bf16": (BF16, {"head_dim": 18}, "head_dim 18: half of it is odd.* use --model-dtype fp32"),
    "wide heads, fp32": (FP32, {"head_dim": 256, "qk_norm": True}, f"256 is wider than the 128 .* {WIDER}"),
    "wide heads, bf16": (BF16, {"head_dim": 264, "qk_norm": True}, "264 is wider than the 256 .* use --device cpu"),
    "exact attention": (FP32, {"head_dim": 264}, "head_dim up to 256, not 264: use --model-dtype bf16"),
    "norm": (FP8["e4m3", "delayed"], {"hidden_size": 16384}, f"hidden size 16384: .* 262144 .* 231424: {CURRENT}"),
    "wide norm": (BF16, {"hidden_size": 32776}, "hidden size 32776 is wider than the 32768 .* use --device cpu"),
    "update": (FP32, {"head_dim": 18, "qk_norm": True}, "attention.q_norm.* has 18 numbers, no multiple of 4.* cpu"),
    "update in 8 bits": (IN_8_BITS, {"intermediate_size": 42}, "down.weight has 42 numbers a row, no multiple of 4"),
    "fp64": (FP64, {}, "stored in fp64, which the GPU kernels do not have: use --device cpu"),
}


@pytest.mark.parametrize(("precision", "shape", "said"), REFUSED.values(), ids=REFUSED)
def test_shapes_that_the_kernels_do_not_take_are_refused_by_the_plan(precision, shape, said):
    scratch = open_backend("planned").scratch_bytes
    with pytest.raises(UsageError, match=said):
        plan_of(precision, config=tiny(**{"num_layers": 1, **shape}), scratch_bytes=scratch)


@pytest.mark.parametrize(
    ("precision", "shape"),
    [
        (FP8_IN_FP32, {"hidden_size": 400, "head_dim": 100}),
        (FP8["e4m3", "delayed"], {"head_dim": 20}),
        (FP32, {"head_dim": 18}),
    ],
    ids=["fp32", "bf16", "without columns"],
)
def test_heads_that_are_no_multiple_of_4_are_planned_for(precision, shape):
    scratch = open_backend("planned").scratch_bytes
    assert plan_of(precision, config=tiny(**{"num_layers": 1, **shape}), scratch_bytes=scratch).total_bytes


def test_a_wide_norm_in_fp8_is_refused_by_the_card_and_taken_with_other_scales():
    """As columns 16 rows of 8192 do not fit a GeForce's 99 KiB."""
    config = tiny(num_layers=1, hidden_size=8192, head_dim=16)
    for name, fits in (("H200", True), ("RTX 4090", False)):
        options = SystemOptions(gpu=name)
        settings = backend_settings(options, pick_device(options))
        scratch = open_backend("planned", **settings).scratch_bytes
        plan_of(FP8["e4m3", "current"], config=config, scratch_bytes=scratch)
        with nullcontext() if fits else pytest.raises(UsageError, match=r"size 8192: .* 131072 .* 100352"):
            plan_of(FP8["e4m3", "delayed"], config=config, scratch_bytes=scratch)


@pytest.mark.parametrize(
    ("precision", "shape", "noise", "said"),
    [
        (BF16, {"batch_size": 1, "seq_len": 2**25}, 0, "33554432 tokens are more than the 16777216"),
        (BF16, {"batch_size": 2**16, "seq_len": 4}, 5.0, "65536 sequences are more .* that --neftune-alpha"),
        (FP32, {"batch_size": 2**16, "seq_len": 4}, 0, "65536 sequences are more .* that attention in fp32"),
    ],
    ids=["tokens", "noise", "attention"],
)
def test_batches_beyond_what_a_launch_takes_are_refused_by_the_plan(precision, shape, noise, said):
    more = {**shape, "regularization": Regularization(neftune_alpha=noise)}
    with pytest.raises(UsageError, match=f"{said}.* use a smaller --batch-size with more --grad-accumulation"):
        plan_of(precision, scratch_bytes=open_backend("planned").scratch_bytes, **more)
