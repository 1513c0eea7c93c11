"""Compare ways to fine-tune: a small model is pre-trained on texts, then trained on GSM8K with LoRA, DoRA, and in full.

    python examples/compare_adapters.py --data data --out gsm8k --jobs 4
    python examples/compare_adapters.py --data data --out gsm8k --steps 3 --cpu-small

The folder of `--data` has texts (*.txt), gsm8k-train.jsonl and gsm8k-test.jsonl (`question`, `answer`), and a folder
with a tokenizer.json and a chat template; all runs are below `--out`. The table has the loss of the held-out answers at
the end for each seed, their mean, and their spread; `untrained` is the pre-trained model. `--jobs` runs share a GPU.
"""

import json
import os
import shutil
from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compare_states import call, held_out_loss, print_table
from tokenizers import Tokenizer

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # 48 million parameters with Qwen2.5's tokenizer
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL_SIZES = {"device": "cpu", "batch_size": 2, "seq_len": 128}
OPTIONS = {
    "batch_size": 16,
    "seq_len": 512,
    "grad_accumulation": 1,
    "warmup_ratio": 0.1,
    "lr_schedule": "cosine",
    "ckpt_interval": 0,
    "overwrite": True,
    "verbosity": -1,
}
LORA = {"lora_rank": 16, "learning_rate": 2e-3}
RECIPES: dict[str, dict[str, Any]] = {
    "full": {"learning_rate": 5e-4},
    "lora": LORA,
    "lora-e4m3": {**LORA, "base_dtype": "e4m3", "matmul_dtype": "e4m3"},
    "lora-nf4": {**LORA, "base_dtype": "nf4"},
    "lora-nf4-e4m3": {**LORA, "base_dtype": "nf4", "matmul_dtype": "e4m3"},
    "dora": {**LORA, "dora": True},
}


def make_model(tokenizer: Path, folder: Path, shape: dict[str, Any]) -> None:
    """A folder with the shape of the model, and its tokenizer."""
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    size = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size()
    (folder / "config.json").write_text(json.dumps({**shape, "vocab_size": -(-size // 128) * 128}))


def tokenize(data: Path, tokenizer: Path, jobs: int) -> None:
    """Token files of the texts, and of both halves of GSM8K with what is trained: the answers."""
    texts = sorted(data.glob("*.txt"))
    if not texts:
        raise SystemExit(f"{data} has no texts (*.txt)")
    inputs = {"texts": texts, "train": [data / "gsm8k-train.jsonl"], "test": [data / "gsm8k-test.jsonl"]}
    about = {"tokenizer": tokenizer, "eval_fraction": 0}
    with ThreadPoolExecutor(jobs) as pool:
        begun = [
            pool.submit(call, "tokenize_data", input=paths, out_dir=Path("tokens", name), **about)
            for name, paths in inputs.items()
        ]
    for one in begun:
        one.result()


def main() -> None:
    """Pre-trains, then trains what RECIPES say, and prints the losses."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200, help="steps of each run; pre-training has twice as many")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", default=",".join(RECIPES), help="recipes, with commas")
    parser.add_argument("--cpu-small", action="store_true", help="a tiny model, on the CPU")
    run(parser.parse_args())


def run(given: Namespace) -> None:
    """All of it, below `given.out`."""
    data = given.data.resolve()
    tokenizers = sorted(path.parent for path in data.glob("*/tokenizer.json"))
    if not tokenizers:
        raise SystemExit(f"{data} has no folder with a tokenizer.json")
    given.out.mkdir(parents=True, exist_ok=True)
    os.chdir(given.out)
    make_model(tokenizers[0], Path("model"), {**SHAPE, **(SMALL if given.cpu_small else {})})
    tokenize(data, tokenizers[0], given.jobs)
    about = {**OPTIONS, **(SMALL_SIZES if given.cpu_small else {})}
    first = {"model": "model", "from_scratch": True, "train_file": "tokens/texts/train.bin", "learning_rate": 1e-3}
    call("train", **about, **first, steps=2 * given.steps, name="pretrained")
    rows = {"train_file": "tokens/train/train.bin", "eval_file": "tokens/test/train.bin", "packing": True}
    about |= {"model": "runs/pretrained/model", "steps": given.steps, "final_eval": "all", **rows}
    about["eval_every_n_steps"] = given.steps
    loss = held_out_loss("untrained", {**about, "steps": 1, "learning_rate": 0, "warmup_ratio": 0})
    print(f"untrained: {loss:.4f}\n")
    recipes = {name: {**about, **RECIPES[name]} for name in given.only.split(",")}
    print_table("trained", "gsm8k", recipes, given.jobs)


if __name__ == "__main__":
    main()
