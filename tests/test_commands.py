"""The command that continues a run gives the same options, read back by the command line itself."""

import shlex

import pytest

from llmq.commands import continue_command
from llmq.options import Options

NEEDED = {"model": "Qwen2.5-0.5B", "train_file": ["a b.bin", "c*.bin"]}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"from_scratch": True, "model_dtype": "fp32", "lr": 3e-4, "steps": 30, "name": "it's"},
        {"matmul_dtype": "e4m3", "recompute_ffn": True, "global_batch_size": 64, "out_dir": "x/%n", "continue": 7},
    ],
)
def test_the_command_gives_the_run_again(given):
    options = Options.parse({**NEEDED, **given})
    program, *flags, last = shlex.split(continue_command(options))
    assert (program, last) == ("llmq-train", "--continue")
    read = {"train_file": []}
    for text in flags:
        key, _, value = text[2:].partition("=")
        if key == "train-file":
            read["train_file"].append(value)
        else:
            read[key] = value or True
    again = Options.parse({**read, "continue": "auto"}).to_flat()
    assert again == {**options.to_flat(), "continue": "auto"}
