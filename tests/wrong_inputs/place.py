"""A folder of good and of broken inputs: models, adapters, token files, data, templates, configs, logs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from golden import families
from safetensors.numpy import save_file
from small_tokenizers import EOS, byte_level, save

from llmq.data.tokens.token_file import TokenWriter

CONFIG = {**families.FAMILIES["qwen2"], "num_hidden_layers": 1, "vocab_size": 420, "torch_dtype": "float32"}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
HEADER = {"type": "header", "schema": 1, "options": {"name": "x"}}
TRAIN = {"type": "train", "step": 1, "loss": 2.0}
DEEP = "[" * 100_000

# What config.json says in model folders without weights.
CONFIGS: dict[str, Any] = {
    "m-moe": {**CONFIG, "num_experts": 8},
    "m-arch": {**CONFIG, "architectures": ["BertForMaskedLM"]},
    "m-places": {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 420,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 24,
    },
    "m-eps": {**CONFIG, "rms_norm_eps": -1},
    "bare": CONFIG,
}
# What adapter_config.json says beside good matrices of q_proj.
ADAPTERS: dict[str, Any] = {
    "a": ADAPTER,
    "a-list": [],
    "a-none": {**ADAPTER, "peft_type": None},
    "a-vera": {**ADAPTER, "peft_type": "VERA"},
    "a-type": {**ADAPTER, "peft_type": ["LORA"]},
    "a-rank": {**ADAPTER, "r": "two"},
    "a-null": {**ADAPTER, "r": None},
    "a-zero": {**ADAPTER, "r": 0},
    "a-alpha": {**ADAPTER, "lora_alpha": {}},
    "a-drop": {**ADAPTER, "lora_dropout": "much"},
    "a-targets": {**ADAPTER, "target_modules": 5},
    "a-regex": {**ADAPTER, "target_modules": "(q_proj"},
    "a-pattern": {**ADAPTER, "rank_pattern": ["q_proj"]},
    "a-pattern-regex": {**ADAPTER, "rank_pattern": {"(q": 3}},
    "a-pattern-text": {**ADAPTER, "alpha_pattern": {"q_proj": "x"}},
    "a-save": {**ADAPTER, "modules_to_save": 5},
    "a-init": {**ADAPTER, "init_lora_weights": ["pissa"]},
    "a-base": {**ADAPTER, "base_model_name_or_path": ["x"], "r": 3},
    "a-foreign": {**ADAPTER, "base_model_name_or_path": "org/other", "target_modules": ["q_proj", "k_proj"]},
    "a-adalora": {**ADAPTER, "peft_type": "ADALORA", "init_r": "x"},
    "a-ia3": {**ADAPTER, "peft_type": "IA3", "feedforward_modules": 3},
    "a-prompt": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": "x"},
}
TEXTS = {
    "nothing.txt": "",
    "blank.txt": "\n \n",
    "text.txt": "To be or not to be.\n" * 40,
    "chats.jsonl": f"{json.dumps(CHAT)}\n" * 20,
    "columns.jsonl": '{"a": 1, "b": 2}\n',
    "robot.jsonl": '{"messages": [{"role": 3, "content": "x"}]}\n',
    "messages.jsonl": '{"messages": "hello"}\n',
    "tokens.jsonl": '{"tokens": [1, 999999]}\n',
    "broken.jinja": "{% for m in %}",
    "raises.jinja": "{{ raise_exception('no') }}",
    "unknown.jinja": "{{ nothing.at.all }}",
    "unknown.yaml": "model: m\ntrain_file: train.bin\nbacth_size: 3\n",
    "prompts.txt": "Once\n",
    "prompts.jsonl": '{"question": "x"}\n',
    "prompts-torn.jsonl": '{"prompt": \n',
    "prompts-deep.jsonl": DEEP + "\n",
    "deep.jsonl": DEEP + "\n",
    "prompts-ids.jsonl": '{"tokens": [1, 100000]}\n',
    "prompts-minus.jsonl": '{"tokens": [-1]}\n',
    "prompts-huge.jsonl": '{"tokens": [1e999]}\n',
    "prompts-chat.jsonl": '{"messages": [{"role": "user"}]}\n',
    "log.txt": "hello\n",
    "steps.jsonl": json.dumps(HEADER) + "\n",
    "run.jsonl": "".join(f"{json.dumps(one)}\n" for one in (HEADER, TRAIN)),
    "schema.jsonl": json.dumps({**HEADER, "schema": 99}) + "\n",
    "nan.jsonl": json.dumps(HEADER) + '\n{"type": "train", "step": 1, "loss": NaN}\n',
}
BYTES = {
    "text.bin": b"this is a text and no token file" * 99,
    "latin.txt": b"caf\xe9 au lait\n",
    "latin.jinja": b"caf\xe9",
}


def write_all(place: Path) -> None:
    """Writes every file of the tables into a new folder."""
    for name, text in {**TEXTS, **BYTES}.items():
        (place / name).write_bytes(text.encode() if isinstance(text, str) else text)
    _write_tokens(place)
    for name, config in CONFIGS.items():
        _write_model(place / name, config)
    _write_model(place / "m", CONFIG, families.weights(CONFIG))
    save(byte_level(), place / "m", {"eos_token": EOS, "chat_template": TEMPLATE})
    weights = families.weights(CONFIG)
    first, *_ = weights
    _write_model(place / "m-less", CONFIG, {name: value for name, value in weights.items() if name != first})
    _write_model(place / "m-shape", CONFIG, {**weights, first: weights[first][:5]})
    _write_model(place / "m-int", CONFIG, {**weights, first: weights[first].astype(np.int32)})
    _write_model(place / "m-nan", CONFIG, {**weights, first: weights[first] * np.nan})
    for name, files in {
        "m-json": {"config.json": "{"},
        "m-none": {},
        "m-pickle": {"config.json": json.dumps(CONFIG), "pytorch_model.bin": "x"},
        "m-torn": {"config.json": json.dumps(CONFIG), "model.safetensors": "x"},
        "m-index": {"config.json": json.dumps(CONFIG), "model.safetensors.index.json": "{"},
        "m-map": {"config.json": json.dumps(CONFIG), "model.safetensors.index.json": '{"weight_map": 3}'},
        "m-shard": {"config.json": json.dumps(CONFIG), "model.safetensors.index.json": '{"weight_map": {"a": "b"}}'},
        "m-out": {"config.json": json.dumps(CONFIG), "model.safetensors.index.json": '{"weight_map": {"a": "../b"}}'},
        "t-torn": {"tokenizer.json": "{"},
        "t-list": {"tokenizer.json": "[]"},
        "t-spm": {"tokenizer.model": "x"},
        "t-config": {"tokenizer.json": byte_level().to_str(), "tokenizer_config.json": "[1"},
        "t-eos": {"tokenizer.json": byte_level().to_str(), "tokenizer_config.json": '{"eos_token": "<none>"}'},
        "a-empty": {"adapter_config.json": json.dumps(ADAPTER)},
        "a-json": {"adapter_config.json": "{", "adapter_model.safetensors": "x"},
        "a-torn": {"adapter_config.json": json.dumps(ADAPTER), "adapter_model.safetensors": "x"},
        "runs": {"one/log.jsonl": TEXTS["steps.jsonl"], "two/notes.txt": ""},
        "several": {"a.jsonl": "", "b.jsonl": ""},
        "taken/model": {"config.json": "{}", "model.safetensors": ""},
    }.items():
        (place / name).mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (place / name / file).parent.mkdir(exist_ok=True)
            (place / name / file).write_text(text)
    for name, about in ADAPTERS.items():
        (place / name).mkdir()
        pair = {f"{Q}A.weight": np.zeros((2, 32), np.float32), f"{Q}B.weight": np.zeros((32, 2), np.float32)}
        save_file(pair, place / name / "adapter_model.safetensors")
        (place / name / "adapter_config.json").write_text(json.dumps(about))


def _write_model(folder: Path, config: Any, weights: Mapping[str, np.ndarray] | None = None) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, folder / "model.safetensors")


def _write_tokens(place: Path) -> None:
    """A good token file, and others: too short, with ids beyond the vocabulary, with a broken sidecar."""
    for name, vocab_size, count in (("train", 420, 600), ("short", 420, 3), ("wide", 99_999, 600)):
        with TokenWriter(place / f"{name}.bin", vocab_size=vocab_size) as file:
            file.append((np.arange(count) % vocab_size).astype(np.int32))
    (place / "sidecar.bin").write_bytes((place / "train.bin").read_bytes())
    (place / "sidecar.bin.json").write_text("{")
