"""What memory options become, in how many chunks the logits come by default, and what no plan can do."""

from dataclasses import replace

import pytest
from test_adapters import adapters
from tiny_engines import BF16, FP8, FP8_HEAD, plan_of

from llmq.errors import UsageError
from llmq.model.optimizer import Hyperparameters
from llmq.optimizers import adamw
from llmq.options.maths import MemoryOptions
from llmq.options.parse import Options
from llmq.plan.memory import RESIDUAL, Memory, fewest_chunks, resolve
from llmq.stores.sharding import Sharding

GIB = 2**30
TOKENS, LOGITS = 32 * 1024, 2 * 152064  # Qwen2.5-0.5B in bf16: 9.3 GiB in all


@pytest.mark.parametrize(("gpu_bytes", "chunks"), [(0, 16), (24 * GIB, 16), (80 * GIB, 8), (141 * GIB, 4)])
def test_chunks_grow_with_the_gpu(gpu_bytes, chunks):
    assert fewest_chunks(TOKENS, LOGITS, gpu_bytes) == chunks


def test_small_logits_are_whole_and_a_chunk_has_a_token_at_least():
    assert fewest_chunks(2 * 1024, 2 * 32000) == 1
    assert fewest_chunks(7, 2 * GIB) == 7


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [(8191, 1), (2 * 8191, 2), (8190, 3), (12 * 1024, 4), (13 * 1024, 4), (2**20, 512), (11 * 1009, 11), (4 * 4093, 4)],
)
def test_an_odd_number_of_tokens_is_not_cut_to_pieces(tokens, chunks):
    assert fewest_chunks(tokens, LOGITS) == chunks


def resolved(flags, **more):
    return resolve(MemoryOptions(**flags), adamw.DEFAULT, batch_size=2, seq_len=16, logit_bytes=1, **more)


STATES = ("master", "m", "v")
FUSED, TILED, REMADE = Memory(fused=True), Memory(seq_tiles=2), Memory(persistent_quants=False)
NONE = replace(BF16, master="none")
HYPER = {"hyper": Hyperparameters(grad_clip=0.5, clips_by_last=True)}
SHARED, ALL_SHARED = ({"sharding": Sharding(0, 2, *levels)} for levels in ((True,), (True, True, True)))


@pytest.mark.parametrize(
    ("own_master", "flags", "expected"),
    [
        (True, {}, Memory()),
        (True, {"offload_opt_v": True}, Memory(host=("v",))),
        (True, {"offload_master": True, "offload_opt_m": True}, Memory(host=("master", "m"))),
        (True, {"offload_optimizer": True}, Memory(host=STATES)),
        (False, {"offload_optimizer": True}, Memory(host=("m", "v"))),
        (True, {"offload_residual": True}, Memory(offload=(RESIDUAL,))),
        (False, {"stream_weights": True}, Memory(host=("master", "weight"))),
        (True, {"offload_gradients": True, "offload_quants": True}, Memory(host=("grad", "quant"))),
        (True, {"use_zero_copy": True, "write_combined": True}, Memory(zero_copy=True, write_combined=True)),
        (True, {"fused_update": True}, FUSED),
        (True, {"seq_tiles": 8}, Memory(seq_tiles=8, head_chunks=8)),
    ],
)
def test_options_become_homes_and_tiles(own_master, flags, expected):
    assert resolved(flags, own_master=own_master) == expected


@pytest.mark.parametrize(
    ("flags", "more", "says"),
    [
        (
            {"offload_master": True},
            {"own_master": False},
            "--offload-master frees no memory .* use --master-dtype fp32",
        ),
        (
            {"fused_update": True},
            {"micro_steps": 4},
            "one micro-batch a step, and a step has 4: use --grad-accumulation 1",
        ),
        ({"seq_tiles": 5}, {}, "^--seq-tiles 5 does not divide the 32 tokens .*: use a divisor"),
    ],
)
def test_options_that_do_nothing_or_do_not_fit_are_refused(flags, more, says):
    with pytest.raises(UsageError, match=says):
        resolved(flags, **more)


def test_copies_that_are_not_kept_are_not_offloaded():
    given = {
        "train_file": "a",
        "model": "m",
        "matmul_dtype": "e4m3",
        "offload_quants": True,
        "persistent_quants": False,
    }
    with pytest.raises(UsageError, match="--no-persistent-quants leaves no copies for --offload-quants to keep"):
        Options.parse(given)


@pytest.mark.parametrize(
    ("precision", "memory", "more", "says"),
    [
        (BF16, FUSED, {}, "--fused-update: .*--grad-clip 1 looks at .* use --clip-by last, or --grad-clip 0"),
        (FP8["e4m3", "delayed"], FUSED, HYPER, "--fused-update: .*use --fp8-scaling current"),
        (BF16, replace(FUSED, host=("grad",)), HYPER, "--fused-update: .*--offload-gradients to keep: leave that out"),
        (BF16, FUSED, HYPER | SHARED, "--fused-update: .*for a run of one GPU, and this one has 2"),
        (FP8["e4m3", "blockwise"], TILED, {}, "--seq-tiles 2: cuBLASLt takes no 1x128 .*: use --fp8-scaling rowwise"),
        (
            BF16,
            TILED,
            {"adapters": adapters(dropout=0.2)},
            r"--seq-tiles 2: --lora-dropout 0\.2 .* use --lora-dropout 0",
        ),
        (
            NONE,
            Memory(host=("weight",)),
            {},
            "--master-dtype none: weights take one byte each .*, and --stream-weights",
        ),
        (
            NONE,
            Memory(host=("master",)),
            {},
            "--master-dtype none: weights take one byte each .*, and --offload-master",
        ),
        (NONE, None, SHARED, "--master-dtype none: weights are whole on each of 2 GPUs: use --zero-level 0"),
        (NONE, None, ALL_SHARED, "--master-dtype none: weights are whole on each of 2 GPUs: use --zero-level 0"),
        (FP8["e4m3", "delayed"], REMADE, SHARED, "--no-persistent-quants: each of 2 GPUs has masters of its share"),
        (
            replace(FP8["e4m3", "current"], master="none"),
            REMADE,
            {},
            "--no-persistent-quants: --master-dtype none makes",
        ),
        (
            replace(FP8_HEAD, scaling="blockwise"),
            None,
            {},
            "--head-dtype e4m3 needs .*use --fp8-scaling rowwise, or leave",
        ),
    ],
)
def test_what_no_plan_can_do_is_refused(precision, memory, more, says):
    with pytest.raises(UsageError, match=says):
        plan_of(precision, memory, **more)


def test_what_is_near_to_that_is_planned():
    assert plan_of(BF16, TILED, adapters=adapters()) and plan_of(NONE, sharding=Sharding(0, 2)).saved()
