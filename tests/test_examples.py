"""The scripts of examples/ run as they are, on the CPU with a tiny model and small data in place of the hub's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_tokenizers import EOS, byte_level, save
from tiny_engines import tiny
from tokenizers import decoders

from llmq.model.config import to_hf
from llmq.report.read import read_log

ROOT = Path(__file__).parents[1]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
CHAT_TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"
SMALL = {"device": "cpu", "seq_len": "64", "batch_size": "2", "grad_accumulation": "1", "steps": "3"}
FLAGS = [f"--{key}={value}" for key, value in SMALL.items()]
COMMANDS = {"llmq-train": "train", "tokenize-data": "tokenize_data", "llmq-plot": "plot"}


@pytest.fixture
def example(tmp_path):
    """A function that runs an example in an empty folder, and returns that folder and what the example printed."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.ByteLevel()
    model = save(tokenizer, tmp_path / "model", {"eos_token": EOS, "chat_template": CHAT_TEMPLATE})
    (model / "config.json").write_text(json.dumps(to_hf(tiny(num_layers=1, vocab_size=420), "bf16")))
    rows = [{"question": f"What is {n} and 1?", "answer": f"It is {n + 1}."} for n in range(40)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "text.txt").write_text("The ships of the king are at sea, and so is he.\n" * 100)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"Ship {n}."}) + "\n" for n in range(40)))
    (tmp_path / "bin").mkdir()
    for command, module in COMMANDS.items():
        shim = tmp_path / "bin" / command
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m llmq.cli.{module} "$@"\n')
        shim.chmod(0o755)
    environ = {**os.environ, "MODEL": str(model), "LLMQ_CACHE_DIR": str(tmp_path / "cache")}
    environ |= {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environ |= {"MPLCONFIGDIR": str(tmp_path / "cache"), "OPENBLAS_NUM_THREADS": "1"}

    def run(name, *arguments, **variables):
        program = "bash" if name.endswith(".sh") else sys.executable
        command = [program, str(ROOT / "examples" / name), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environ | variables, text=True, capture_output=True)
        assert not done.returncode, done.stdout + done.stderr
        return tmp_path, done.stdout

    return run


def steps(run):
    """Steps of the log in a run's folder."""
    return read_log(run).train["step"].tolist()


def test_pretrain(example):
    folder, _ = example("pretrain.sh", *FLAGS, TEXT="text.txt")
    run = folder / "runs/pretrain"
    assert steps(run) == [1, 2, 3]
    assert (run / "model/model.safetensors").is_file() and (run / "loss.png").is_file()


def test_finetune_chats(example):
    folder, said = example("finetune_chats.sh", *FLAGS, "--from-scratch", DATA="chats.jsonl")
    assert steps(folder / "runs/chats") == [1, 2, 3]
    assert "would be tokenized" in said and "assistant:[[ It is" in said


def test_own_data(example):
    folder, said = example("own_data.py", "model=model", "from_scratch=true", *(flag[2:] for flag in FLAGS))
    assert steps(folder / "runs/own-data") == [1, 2, 3]
    assert "after 3 steps" in said and "[[" in said


def test_mixture(example):
    folder, said = example("mixture.sh", *FLAGS, "--from-scratch", CHATS="chats.jsonl", TEXT="texts.jsonl")
    assert steps(folder / "runs/mixture") == [1, 2, 3]
    assert "chats.jsonl: 33.33% of the tokens" in said  # 2 of 6 samples, the nearest to 30%


@pytest.mark.slow
def test_compare_recipes(example):
    folder, said = example("compare_recipes.sh", *FLAGS, TEXT="text.txt")
    losses = [read_log(folder / "runs" / name).train["loss"].tolist() for name in ("bf16", "bf16-seed-1", "e4m3")]
    assert len({tuple(loss) for loss in losses}) == 3
    assert "bf16-seed-1" in said and (folder / "runs/recipes.png").is_file()


def test_every_example_has_a_test():
    examples = {path.stem for path in (ROOT / "examples").iterdir()}
    assert examples and not {name for name in examples if f"test_{name}" not in globals()}
