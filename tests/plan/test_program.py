"""Programs: casts where a producer cannot write a form, shared memory, sums, scales, and the memory table."""

from collections import Counter

import pytest
from tiny_engines import BF16, FP8, FP32, plan_of, tiny

from llmq.plan.arena import aligned
from llmq.plan.memory import Memory
from llmq.plan.names import storage_name
from llmq.tensor import stored_bytes

DELAYED, CURRENT = FP8["e5m2", "delayed"], FP8["e5m2", "current"]


def ops_of(plan, name="first"):
    return Counter(call.op for call in plan.programs[name].calls)


def test_producers_write_quantized_forms_and_only_attention_s_output_is_cast():
    casts = [s for s in plan_of(DELAYED).programs["first"].calls if s.op == "cast"]
    layers = tiny().num_layers
    assert sum(s.outputs[0].ref.name.endswith("attention.att") for s in casts) == 2 * layers  # row, then col again
    assert len(casts) == 2 * layers


def test_a_scale_by_row_or_block_takes_the_bytes_of_its_shape():
    """Kept beside the copies of an activation, and persistent beside those of a weight; nothing in a checkpoint."""
    tokens, width = 2 * 128, 48
    for scaling, kept, weight in (
        ("rowwise", {}, {"row/rowwise": (2 * 64,), "col/rowwise": (width,)}),
        ("blockwise", {"col/blockwise": 4 * tokens // 128 * width}, {"row/tilewise": (1, 4), "col/tilewise": (1, 4)}),
    ):
        plan = plan_of(FP8["e4m3", scaling], seq_len=128)
        scales = {name: size for name, size in plan.kept.items() if "mlp.x@scale" in name}
        assert scales == {f"0/{n}.mlp.x@scale/e4m3/{k}": aligned(size) for n in range(2) for k, size in kept.items()}
        for key, shape in weight.items():
            assert plan.persistent[f"weight:layers.0.mlp.up.weight@scale/e4m3/{key}"].shape == shape
        assert not plan.scales and not [name for name in plan.state() if "scale" in name]


@pytest.mark.parametrize("precision", [FP32, BF16])
def test_plain_dtypes_need_no_cast(precision):
    assert not {"cast", "quantize", "amax_scale", "scale_update"} & {
        *ops_of(plan_of(precision)),
        *ops_of(plan_of(precision), "update"),
    }


def test_statistics_are_collected_in_training_only_and_never_in_a_replay():
    programs = plan_of(DELAYED, Memory(("recompute_ffn",))).programs
    for name, program in programs.items():
        for call in program.calls:
            for result in filter(None, call.outputs):
                if name in ("evaluate", "publish") or call.phase == "replay":
                    assert not result.amax, (name, call.op)
    collected = {cell for call in programs["first"].calls for r in filter(None, call.outputs) for cell in r.amax}
    collected |= {cell for call in programs["update"].calls for r in filter(None, call.outputs) for cell in r.amax}
    assert collected == set(plan_of(DELAYED).scales)


def test_logits_and_their_gradient_share_memory():
    for chunks in (1, 4):
        program = plan_of(BF16, Memory((), head_chunks=chunks)).programs["first"]
        assert program.places["0/head.logits#0"] == program.places["0/d.head.logits#0"]
        assert program.places["0/0.attention.qkv"] == program.places["0/0.attention.rot"]


def test_what_is_kept_for_backward_is_not_overwritten_in_place():
    # Qwen3's norm on q and k reads the projection in backward, so rope works on the normed copy
    config = tiny(architecture="Qwen3ForCausalLM", qk_norm=True, qkv_bias=False)
    program = plan_of(BF16, config=config).programs["first"]
    assert program.places["0/0.attention.qkv"] != program.places["0/0.attention.normed"]
    assert program.places["0/0.attention.normed"] == program.places["0/0.attention.rot"]


def test_evaluation_writes_no_gradient_and_no_transposed_copy():
    calls = plan_of(DELAYED).programs["evaluate"].calls
    written = [storage_name(ref) for s in calls for ref in s.written]
    assert not [name for name in written if any(part in name for part in (".d.", "/d.", "/col/", "grad:"))]


def test_a_bf16_weight_is_its_own_master():
    table = plan_of(BF16).table()
    assert table["Master"] == 0 and table["Weights"] > 0
    wide = plan_of(FP8["e4m3", "delayed"].__class__(**{**BF16.__dict__, "master": "fp32"})).table()
    assert wide["Master"] == pytest.approx(2 * wide["Weights"], rel=0.2)
    assert wide["Weights"] == table["Weights"]


@pytest.mark.parametrize("precision", [DELAYED, *(FP8["e5m2", name] for name in ("rowwise", "blockwise"))])
def test_the_table_names_every_byte_that_the_engine_allocates(precision):
    plan = plan_of(precision)
    persistent = sum(aligned(stored_bytes(ref)) for ref in plan.persistent.values())
    assert plan.total_bytes == persistent + plan.arena_bytes() == sum(plan.table().values())
