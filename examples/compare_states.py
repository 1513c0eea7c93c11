"""Compare dtypes of optimizer states: a small model trained on a text from scratch, with each, on the CPU or a GPU.

    python examples/compare_states.py tinyshakespeare.txt
    python examples/compare_states.py tinyshakespeare.txt --only=fp32,int8 --jobs=4 steps=100

The first argument is a text file; `--only` names some of RECIPES, `--jobs` is the number of runs at a time. Others are
options of `llmq-train` as KEY=VALUE, which override those below. The table has the held-out loss at the end for each
seed, their mean, and their spread, beside which a difference between rows is to be seen.
"""

import json
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from llmq.report.read import read_log

MODEL, SEEDS = Path("runs/states-model"), (1, 2)
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
OPTIONS = {
    "from_scratch": True,
    "model_dtype": "fp32",
    "seq_len": 128,
    "batch_size": 8,
    "grad_accumulation": 1,
    "steps": 300,
    "learning_rate": 3e-3,
    "warmup_ratio": 0.1,
    "lr_schedule": "cosine",
    "final_eval": "all",
    "overwrite": True,
    "verbosity": -1,
}
INT8_E4M3 = {"opt_m_dtype": "int8", "opt_v_dtype": "e4m3"}
FUSED = {"fused_update": True, "clip_by": "last"}
RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"opt_m_dtype": "bf16", "opt_v_dtype": "bf16"},
    "e4m3": {"opt_m_dtype": "e4m3", "opt_v_dtype": "e4m3"},
    "int8": {"opt_m_dtype": "int8", "opt_v_dtype": "int8"},
    "e4m3-int8": {"opt_m_dtype": "e4m3", "opt_v_dtype": "int8"},
    "int8-e4m3": INT8_E4M3,
    "none": {"master_dtype": "none"},
    "none-int8-e4m3": {"master_dtype": "none", **INT8_E4M3},
    "fused": FUSED,
    "fused-none-int8-e4m3": {"master_dtype": "none", **INT8_E4M3, **FUSED},
    # weights in bf16, with masters beside them or without
    "bf16-master-fp32": {"model_dtype": "bf16", "master_dtype": "fp32"},
    "bf16-master-bf16": {"model_dtype": "bf16", "master_dtype": "bf16"},
    "bf16-master-bf16-int8-e4m3": {"model_dtype": "bf16", "master_dtype": "bf16", **INT8_E4M3},
}


def call(command: str, **options: Any) -> None:
    """Runs a command of llmq, `train` or `tokenize_data`, in a process of its own. SystemExit with what it printed."""
    pairs = [(key, one) for key, value in options.items() for one in (value if isinstance(value, list) else [value])]
    flags = [f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}") for key, value in pairs]
    start = f"from llmq.cli.start import {command}; {command}()"
    done = subprocess.run([sys.executable, "-c", start, *flags], text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{command} {' '.join(flags)}\n{done.stdout}{done.stderr}")


def held_out_loss(name: str, options: Mapping[str, Any]) -> float:
    """Trains the run `name`, and returns the loss of its last evaluation."""
    began = time.monotonic()
    call("train", **options, name=name)
    loss = float(read_log(Path("runs", name)).eval["loss"][-1])
    print(f"{name}: {loss:.4f}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return loss


def print_table(title: str, prefix: str, recipes: Mapping[str, Mapping[str, Any]], jobs: int) -> None:
    """Trains every recipe with every seed, this many `jobs` at a time, and prints a row for each recipe."""
    with ThreadPoolExecutor(jobs) as pool:
        found = {
            (name, seed): pool.submit(held_out_loss, f"{prefix}-{name}-{seed}", {**options, "seed": seed})
            for name, options in recipes.items()
            for seed in SEEDS
        }
        print(f"| {title} | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | mean | spread |")
        print("|---|" + "---|" * (len(SEEDS) + 2))
        for name in recipes:
            losses = [found[name, seed].result() for seed in SEEDS]
            row = (*losses, sum(losses) / len(losses), max(losses) - min(losses))
            print(f"| {name} | " + " | ".join(f"{number:.4f}" for number in row) + " |", flush=True)


def make_model(text: str) -> None:
    """A folder with the shape of the model, and a tokenizer of the text's own words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"], special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    MODEL.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(MODEL / "tokenizer.json"))
    (MODEL / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (MODEL / "config.json").write_text(json.dumps(SHAPE))


def main() -> None:
    """Trains what the command line asks for, and prints the losses."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--only", default=",".join(RECIPES), help="recipes, with commas")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE", help="options of llmq-train")
    given = parser.parse_intermixed_args()
    make_model(given.text.read_text())
    more = dict(option.split("=", 1) for option in given.options)
    about = {**OPTIONS, "model": MODEL, "data": given.text}
    recipes = {name: {**about, **RECIPES[name], **more} for name in given.only.split(",")}
    print_table("states", "states", recipes, given.jobs)


if __name__ == "__main__":
    main()
