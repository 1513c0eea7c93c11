"""Compare dtypes of optimizer states: a small model trained on a text from scratch, with each, on the CPU or a GPU.

    python examples/compare_states.py tinyshakespeare.txt
    python examples/compare_states.py tinyshakespeare.txt only=fp32,int8 steps=100

The first argument is a text file. Others are options of `llmq-train` as KEY=VALUE, which override those below, and
`only`, which names some of RECIPES. The table has the held-out loss at the end for each seed.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import llmq

MODEL, SEEDS = Path("runs/states-model"), (1, 2)
SHAPE = {
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
RECIPES = {
    "fp32": {},
    "bf16": {"opt_m_dtype": "bf16", "opt_v_dtype": "bf16"},
    "e4m3": {"opt_m_dtype": "e4m3", "opt_v_dtype": "e4m3"},
    "int8": {"opt_m_dtype": "int8", "opt_v_dtype": "int8"},
    "e4m3-int8": {"opt_m_dtype": "e4m3", "opt_v_dtype": "int8"},
    "int8-e4m3": {"opt_m_dtype": "int8", "opt_v_dtype": "e4m3"},
    "none": {"master_dtype": "none"},
    "none-int8-e4m3": {"master_dtype": "none", "opt_m_dtype": "int8", "opt_v_dtype": "e4m3"},
}


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


def main(text: str, *arguments: str) -> None:
    """Trains every recipe with every seed, and prints the losses."""
    make_model(Path(text).read_text())
    given = dict(argument.split("=", 1) for argument in arguments)
    names = given.pop("only", ",".join(RECIPES)).split(",")
    print("| states | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " |")
    print("|---|" + "---|" * len(SEEDS))
    for name in names:
        losses = []
        for seed in SEEDS:
            options = {**OPTIONS, **RECIPES[name], **given, "seed": seed, "name": f"states-{name}-{seed}"}
            losses.append(llmq.train(model=str(MODEL), data=text, **options).eval_loss)
        print(f"| {name} | " + " | ".join(f"{loss:.4f}" for loss in losses) + " |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
