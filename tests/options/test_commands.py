"""The command that continues a run gives the same options, read back by the command line itself."""

import shlex

import pytest

from llmq.cli import train
from llmq.options.commands import continue_command
from llmq.options.parse import Options, descriptions

NEEDED = {"model": "Qwen2.5-0.5B", "train_file": ["a b.bin", "c*.bin"]}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"from_scratch": True, "model_dtype": "fp32", "lr": 3e-4, "steps": 30, "name": "it's"},
        {"use_cuda_graphs": False, "deterministic": False, "packing": False},
        {"packing": True, "max_docs": 4, "weight": [0.5, 0.5], "fp8_fallback": True, "matmul_dtype": "e4m3"},
        {"model_dtype": "fp32", "matmul_dtype": "bf16", "grad_accum_dtype": "bf16", "master_dtype": "fp32"},
        {"packing": "windows", "attn_bwd_chunks": 2},
        {"lr_schedule": "cosine", "lr": 3e-4, "min_lr": 1e-5, "warmup_ratio": 0.1, "export_anyway": True},
        {"lr_schedule": "cosine", "final_lr_fraction": 1, "continue": "auto"},
        {"steps": 5, "epochs": None, "log_fp8_every": 0, "matmul_dtype": "e4m3"},
        {"matmul_dtype": "e4m3", "recompute_ffn": True, "global_batch_size": 64, "out_dir": "x/%n", "continue": 7},
    ],
)
def test_the_command_gives_the_run_again(given):
    options, start = Options.parse({**NEEDED, **given}), ("llmq-launch", "--procs=2", "--")
    program, *arguments = shlex.split(continue_command(options, start))
    assert (program, arguments.pop(0), arguments.pop(0), arguments[-1]) == (*start, "--continue")
    read = train.command().make_context(program, arguments).params
    again = Options.parse({k: v for k, v in read.items() if k in descriptions() and v not in (None, ())}).to_flat()
    assert again == {**options.to_flat(), "continue": "newest"}
