"""Remedies: the fewest chunks that fit, what options they are, and that each makes a plan need less."""

from dataclasses import replace

import pytest
from tiny_engines import BF16, plan_of, tiny

from llmq.backends.opening import open_backend
from llmq.backends.planned import PlannedBackend
from llmq.blocks.packed import Packing
from llmq.hardware.device import memory_bytes, pick_device
from llmq.model.parameters import padded_vocab
from llmq.model.presets import preset
from llmq.ops.record import Call
from llmq.optimizers import adamw
from llmq.options.maths import MemoryOptions
from llmq.options.parse import Options
from llmq.plan import precision
from llmq.plan.memory import Memory, resolve
from llmq.plan.plan import make_plan
from llmq.plan.remedies import (
    NOTHING,
    Terms,
    alternatives,
    axes,
    changes,
    last_alternatives,
    levels,
    masters,
    typed,
    with_fitting_chunks,
)
from llmq.tensor import Ref
from llmq.training.ready import Facts

SCRATCH = 1 << 20


def scratch_bytes(call):
    """As attention's workspaces: the more sequences, the more."""
    return SCRATCH * call.inputs[0].shape[0] if call.op == "attention_backward" else 0


def per_batch(call):
    """Of a backend whose workspace does not get smaller in pieces."""
    return SCRATCH * call.inputs[0].shape[0] if call.op == "rope_backward" else 0


def fitting(free_bytes, scratch=scratch_bytes, **numbers):
    """A plan for 12 rows that chooses its chunks."""
    plan = plan_of(BF16, config=tiny(), batch_size=12, scratch_bytes=scratch, **numbers)
    return plan, with_fitting_chunks(plan, free_bytes, scratch)


def test_the_fewest_chunks_that_fit_are_taken():
    whole, same = fitting(2**40)
    assert same is whole and whole.spec.memory.attention_chunks == 1
    for chunks in (2, 3, 4, 6, 12):
        expected = plan_of(BF16, Memory((), 1, chunks), tiny(), batch_size=12, scratch_bytes=scratch_bytes)
        for room in (0, SCRATCH // 2):
            _, found = fitting(expected.total_bytes + room)
            assert found.spec.memory == expected.spec.memory and found.total_bytes == expected.total_bytes
    _, least = fitting(expected.total_bytes - 1)
    assert least.spec.memory.attention_chunks == 12, "the error then counts from here"


def test_chunks_that_save_nothing_are_not_taken():
    """On the CPU, whose attention takes no workspace, and where another op needs as much."""
    for scratch in (None, per_batch):
        plan, same = fitting(2**20, scratch)
        assert same is plan


SEVEN = {"batch_size": 4, "seq_len": 4096}
CONFIG = replace(preset("Qwen2.5-7B"), num_layers=2)
ROOM = int(8.4 * 2**30)  # what an H200 has free beside all 28 layers of it


def seven(packing, free_bytes=2**40, deterministic=True):
    """A plan of Qwen2.5-7B in bf16, 4x4096."""
    sizes = {**SEVEN, "logit_bytes": 2 * padded_vocab(CONFIG), "gpu_bytes": 141 * 10**9}
    limits = resolve(MemoryOptions(), adamw.DEFAULT, **sizes)
    scratch = open_backend("planned", deterministic=deterministic).scratch_bytes
    found = plan_of(BF16, limits, CONFIG, packing=packing, scratch_bytes=scratch, **SEVEN)
    return with_fitting_chunks(found, free_bytes, scratch)


def test_what_fits_dense_fits_packed():
    dense = seven(None)
    free = dense.total_bytes + ROOM
    assert dense.spec.memory.attention_chunks == 1
    for packing in (Packing(8, 4096), Packing(16, 1500), Packing(4, 4096), Packing(60, 400)):
        packed = seven(packing, free)
        assert packed.total_bytes <= free
        assert (packed.spec.memory.attention_chunks > 1) == (packing != Packing(60, 400))


def test_the_workspace_of_packed_rows_goes_with_the_longest_document():
    """Measured with cuDNN 9.19, deterministic and not, at 16x2048: 8 documents of up to 2048, 20 of up to 537."""
    shapes = {"d_att": 896, "qkv": 1152, "att": 896}
    refs = [Ref(name, "activation", (16, 2048, width), "bf16") for name, width in shapes.items()]
    refs.append(Ref("lse", "activation", (16, 2048, 14), "fp32"))
    numbers = {"num_heads": 14, "num_kv_heads": 2, "window": None, "softmax_scale": 0.125}
    for max_docs, longest, measured in ((8, 2048, [15.97, 2.11]), (20, 2048, [36.97, 2.11]), (20, 537, [5.51, 2.11])):
        borders = Ref("borders", "batch", (16, max_docs + 1), "int32")
        call = Call("attention_backward", (None,), (*refs, borders), {**numbers, "longest": longest}, "backward")
        found = [
            PlannedBackend(deterministic=deterministic).scratch_bytes(call) / 2**30 for deterministic in (True, False)
        ]
        assert found == pytest.approx(measured, rel=0.01)


GIVEN = {
    "plain": {},
    "e4m3": {"matmul_dtype": "e4m3", "fp8_scaling": "current", "log_fp8_every": 100},
    "copies": {"matmul_dtype": "e4m3", "offload_quants": True},
    "a moment": {"offload_opt_v": True, "batch_size": 6, "recompute_ffn": True},
    "hosted": {"offload_optimizer": True, "offload_gradients": True, "offload_residual": True, "attn_bwd_chunks": 2},
    "streamed": {"stream_weights": True, "offload_optimizer": True, "model_dtype": "bf16", "master_dtype": "fp32"},
    "sgd": {"optimizer": "sgd"},
    "momentum": {"optimizer": "sgd", "momentum": 0.9, "offload_optimizer": True, "master_dtype": "fp32"},
    "adapters": {"lora_rank": 8, "batch_size": 1, "seq_len": 8192},
    "ranks": {"zero_level": 1},
}


def resolved(options, size):
    """The spec of options on the first of several ranks."""
    facts = Facts(replace(preset("Qwen2.5-0.5B"), num_layers=4), pick_device(options.system), size=size)
    return facts.spec(options, precision.resolve(options.precision, facts.config))


@pytest.mark.quick(
    "plain-*", "e4m3-False", "hosted-True", "streamed-False", "momentum-True", "adapters-False", "ranks-False"
)
@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("name", GIVEN)
def test_a_changed_spec_is_what_its_options_give(name, undo):
    """Each remedy of each alternative, and all that need least."""
    size = 2 if name == "ranks" else 1
    given = {"model": "Qwen2.5-0.5B", "from_scratch": True, "dry_run": True, "train_file": "none", "gpu": "H200"}
    given |= {"clip_by": "last", "grad_accumulation": 4, **GIVEN[name]}
    options = Options.parse(given)
    spec = resolved(options, size)
    sizes = tuple(n for n in (16, 4, 1) if 4 * spec.batch_size % n == 0)
    gpu_bytes = memory_bytes(pick_device(options.system))[0]
    terms = Terms(4 * spec.batch_size, sizes, gpu_bytes=gpu_bytes, may_undo=undo)
    every = [
        NOTHING,
        *alternatives(spec, may_relax=True),
        *last_alternatives(spec, terms),
        *levels(spec),
        *masters(spec),
    ]
    found = set()
    for alternative in every:
        base = alternative.of(spec)
        each = axes(base, terms)
        tried = [one(base) for axis in each for one in axis]
        for axis in each:
            base = axis[-1](base)
        for after in [*tried, base] if alternative in (NOTHING, every[-1]) else [base]:
            options = changes(spec, after, terms)
            found.add(typed(options))
            again = resolved(Options.parse({**given, **options}), size)
            assert ordered(again) == ordered(after), typed(options)
    assert len(found) > 8


def ordered(spec):
    """Spaces of the host have no order."""
    return replace(spec, memory=replace(spec.memory, host=sorted(spec.memory.host)))


def test_smaller_micro_batches_keep_the_samples_of_a_step():
    spec = plan_of(BF16, config=tiny(), batch_size=12).spec

    def found(**about):
        terms = Terms(24, (12, 6, 1), **about)
        return [changes(spec, one(spec), terms) for one in axes(spec, terms)[1]]

    assert found() == [{}, {"batch_size": 6, "grad_accumulation": 4}, {"batch_size": 1, "grad_accumulation": 24}]
    assert found(counts_steps=False) == [{}, {"batch_size": 6}, {"batch_size": 1}]  # of a --global-batch-size
    assert found(counts_steps=False, names_size=True)[0] == {"batch_size": 12}
    assert len(found(given=frozenset({"batch_size"}))) == 1


def test_each_on_an_axis_takes_no_more_of_the_device_than_those_before_it():
    plan = plan_of(BF16, config=tiny(num_layers=4), batch_size=4, seq_len=32)
    for axis in axes(plan.spec, Terms(16, (4, 2, 1))):
        sizes = [make_plan(one(plan.spec)).total_bytes for one in axis]
        assert sizes == sorted(sizes, reverse=True)
