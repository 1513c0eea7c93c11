"""Options without effect in a run are a line for each reason, where they are given and the reason holds."""

from pathlib import Path

import pytest

import llmq
from llmq.options.parse import Options
from llmq.training.ranks import Ranks
from llmq.training.train import run

GPU = {"device": "cuda", "gpu": "H200", "model_dtype": "bf16"}
MANY = {**GPU, "gpus": 4}
NO_EVAL = {"eval_file": None, "eval_every_n_steps": 100}
WITHOUT_DATA = "without data to evaluate on, such as --eval-file"
ON_HOST = "without something on the host, such as --offload-optimizer"


def notices(given):
    """The lines of a dry run that say what has no effect."""
    llmq.train(**{key: value for key, value in given.items() if value is not None}, dry_run=True)
    return [line for line in given["console"].getvalue().splitlines() if "no effect" in line]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"zero_level": 3}, "--zero-level 3 has no effect in a run of one process"),
        (
            {"shard_weights": True, "gradient_compression": "e4m3", "memcpy_all_gather": False},
            "--shard-weights, --gradient-compression e4m3 and --no-memcpy-all-gather have no effect in a run of one "
            "process",
        ),
        ({"restart_failed": 2}, "--restart-failed 2 has no effect without --gpus, llmq-launch or --launcher ray"),
        ({"use_cuda_graphs": False}, "--no-use-cuda-graphs has no effect on the CPU"),
        ({"write_combined": True, "offload_optimizer": True}, "--write-combined has no effect on the CPU"),
        ({"host_memory_limit": "1GiB"}, "--host-memory-limit 1GiB has no effect on the CPU: --memory-limit limits its"),
        ({**GPU, "host_memory_limit": "1GiB"}, f"--host-memory-limit 1GiB has no effect {ON_HOST}"),
        ({**GPU, "write_combined": True}, f"--write-combined has no effect {ON_HOST}"),
        ({"use_zero_copy": True, "offload_residual": True}, "--use-zero-copy has no effect without optimizer states"),
        ({"offload_quants": True}, "--offload-quants has no effect without e4m3 matmuls of weights that are trained"),
        ({"persistent_quants": False}, "--no-persistent-quants has no effect without e4m3 matmuls of weights that are"),
        (
            {"matmul_dtype": "e4m3", "model_dtype": "bf16", "lora_rank": 2, "offload_quants": True},
            "--offload-quants has no effect without e4m3 matmuls of weights that are trained",
        ),
        ({**MANY, "zero_level": 0, "memcpy_all_gather": True}, "--memcpy-all-gather has no effect at --zero-level 0"),
        ({**MANY, "memcpy_send_recv": False}, "--no-memcpy-send-recv has no effect without --all-to-all-reduce"),
        ({"train_only": "*.bias", "weight_decay": 0.5}, "--weight-decay 0.5 has no effect without a matrix or an"),
        ({**NO_EVAL, "eval_every_n_steps": 7}, f"--eval-every-n-steps 7 has no effect {WITHOUT_DATA}"),
        ({**NO_EVAL, "eval_num_steps": 7}, f"--eval-num-steps 7 has no effect {WITHOUT_DATA}"),
        ({"eval_every_n_steps": 0, "final_eval": "all"}, "--final-eval all has no effect with --eval-every-n-steps 0"),
        ({"sample_tokens": 5}, "--sample-tokens 5 has no effect without --sample-prompts"),
    ],
)
def test_an_option_without_effect_is_a_line(given, options, said):
    if "lora_rank" in options:
        given |= {"learning_rate": 1e-4}
    (line,) = notices(given | options)
    assert line.startswith(said)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**MANY, "zero_level": 3, "restart_failed": 2, "shard_gradients": True, "reduce_dtype": "fp32"},
        {**MANY, "all_to_all_reduce": True, "memcpy_send_recv": False, "memcpy_all_gather": False},
        {**GPU, "use_cuda_graphs": False, "deterministic": False},
        {**GPU, "write_combined": True, "use_zero_copy": True, "offload_gradients": True, "host_memory_limit": "9GiB"},
        {**GPU, "write_combined": True, "offload_residual": True},
        {"host_memory_limit": "9GiB", "stream_weights": True, "use_zero_copy": True},
        {"matmul_dtype": "e4m3", "model_dtype": "bf16", "persistent_quants": False},
        {"eval_num_steps": 3, "final_eval": "all"},
        {**NO_EVAL, "eval_every_n_steps": 0},
        {"train_file": None, **NO_EVAL, "eval_num_steps": 3},  # a plan does not know the data
        {"sample_prompts": "prompts.jsonl", "sample_tokens": 5, "eval_every_n_steps": 7, "eval_file": None},
    ],
)
def test_one_with_effect_is_none(given, options):
    Path("prompts.jsonl").write_text('{"tokens": [1, 2]}\n')
    assert notices(given | options) == []


@pytest.mark.parametrize("restarts", [True, False])
def test_a_process_that_is_not_started_again_says_so(given, restarts):
    console = given.pop("console")
    run(Options.parse({**given, "restart_failed": 2, "steps": 2}), console=console, ranks=Ranks(can_restart=restarts))
    assert ("--restart-failed 2 has no effect" in console.getvalue()) != restarts
    assert ("--restart-failed 2 has no effect" in Path("runs/run/log.jsonl").read_text()) != restarts
