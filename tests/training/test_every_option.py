"""No option is without effect in silence: each changes the bits, the plan or the output of a run, or a line or an error
says that it does not.

The walk is over the schema of the options, so that a new one needs a value in VALUES, unless it is a flag or a choice.
"""

import hashlib
import io
import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from in_process import run_ranks
from small_tokenizers import EOS, byte_level, save
from tiny_engines import tiny
from tiny_runs import write_weights
from tokenizers import decoders

import llmq
from llmq.adapters.method import NoAdapters
from llmq.data.tokens.token_file import TokenWriter
from llmq.errors import LlmqError
from llmq.model.config import to_hf
from llmq.options.parse import SECTIONS, Options, descriptions
from llmq.training import train, without_effect
from llmq.training.ranks import Ranks

T, VOCAB = 16, 420
# fmt: off
BASE = {
    "model": "base", "train_file": "train.bin", "eval_file": "eval.bin", "name": "run", "device": "cpu",
    "model_dtype": "fp32", "batch_size": 2, "seq_len": T, "grad_accumulation": 2, "learning_rate": 1e-2,
    "steps": 5, "eval_every_n_steps": 2, "eval_num_steps": 1, "ckpt_interval": 3,
}
# fmt: on
ON_ROWS = {**BASE, "train_file": None, "eval_file": None, "data": "rows.jsonl", "seq_len": 12, "eval_fraction": 0.1}
FP8 = {"model_dtype": "bf16", "matmul_dtype": "e4m3"}
PLAIN = "windows"
RUNS = {  # what the options are walked in
    PLAIN: {},
    "from scratch": {"model": "source", "from_scratch": True},
    "fp8": FP8,
    "held out nothing": {"eval_file": None, "eval_every_n_steps": None, "eval_num_steps": None},
    "rows": ON_ROWS,
    "stream": {**ON_ROWS, "streaming": True, "eval_fraction": None},
    "lora": {"lora_rank": 2},
    "ia3": {"ia3": "k_proj,v_proj,down_proj"},
    "packed": {"packing": True},
    "hosted": {"offload_opt_m": True},
    "adapter": {"adapter": "adapter"},
    "adalora": {"lora_rank": 4, "adalora": True, "adalora_interval": 2},
    "prompt": {"prompt_tuning": 2, "packing": False},
    "prefix": {"prefix_tuning": 2, "packing": False},
    "biases": {"train_only": "*.bias"},
    "never evaluated": {"eval_every_n_steps": 0},
    "ranks": {},
    "ranks of fp8": {**FP8, "grad_accum_dtype": "fp32"},
    "ranks of lora": {"lora_rank": 2},
    "sgd": {"optimizer": "sgd", "momentum": 0.9},
}
THIRDS = {"fp8": 0, "rows": 1, "lora": 2}  # of the options in some of them, the one that is no sweep
# fmt: off
VALUES = {  # unlike the default, and what the runs above have
    "model": "again", "revision": "main", "tokenizer": "tokenizer", "add_tokens": "tokens.txt",
    "family": "family.yaml",
    "train_file": "other.bin", "weight": [2.0], "eval_file": "other.bin", "batch_size": 1, "global_batch_size": 6,
    "grad_accumulation": 1, "seq_len": 24, "packing": True, "max_docs": 3, "data": "other.jsonl", "eval_fraction": 0.3,
    "data_format": "text", "map": ["question=answer"], "prompt_template": "prompt.jinja", "train_on": "all",
    "chat_template": "chat.jinja", "skip_bad_rows": 2, "lora_rank": 3, "lora_alpha": 3.0,
    "lora_dropout": 0.3, "lora_targets": "mlp", "lora_rank_pattern": "mlp=1",
    "lora_alpha_pattern": "mlp=1", "adalora_target_rank": 1, "adalora_warmup": 1, "adalora_final": 1,
    "adalora_interval": 1, "adalora_beta1": 0.5, "adalora_beta2": 0.5, "adalora_orth_reg": 0.1,
    "lora_plus_ratio": 4.0, "train_also": "lm_head", "adapter": "adapter",
    "ia3": "k_proj,down_proj", "prompt_tuning": 3, "prefix_tuning": 3,
    "train_only": "*.bias", "bf16_layers": "layers.0", "fp8_layers": "layers.1",
    "log_fp8_every": 1, "fit_may": "states", "lmhead_chunks": 4, "seq_tiles": 2, "attn_bwd_chunks": 2,
    "zero_level": 3, "steps": 4, "epochs": 0.5, "learning_rate": 2e-2, "warmup": 2, "warmup_ratio": 0.5,
    "cooldown": 2, "min_lr": 1e-3, "final_lr_fraction": 0.1, "momentum": 0.5, "beta_1": 0.5, "beta_2": 0.5,
    "adam_epsilon": 1e-3, "weight_decay": 0.5, "grad_clip": 0.01, "z_loss": 1e-2, "neftune_alpha": 5.0, "name": "other",
    "log_file": "runs/here.jsonl", "log_every": 3, "eval_every_n_steps": 1, "eval_num_steps": 2,
    "sample_prompts": "prompts.txt", "sample_tokens": 3, "sample_temperature": 2.0, "sample_length": 20,
    "verbosity": 1, "log_gpu_util": 1, "eval_metrics": "exact_match", "eval_answers": 3,
    "checkpoint_dir": "runs/there", "ckpt_interval": 1, "ckpt_keep_n": 1, "ckpt_major": 1, "continue": "newest",
    "reset": "optimizer", "out_dir": "runs/outs", "gpus": 2, "gpu": "H200", "memory_limit": "1MiB",
    "host_memory_limit": "1MiB", "seed": 1, "ray_address": "auto", "restart_failed": 2,
    "debug_memory": "runs/tensors.txt", "device": "cuda", "export_dtype": "fp16", "matmul_dtype": ["bf16", "e4m3"],
    "head_dtype": "e4m3", "reduce_dtype": "bf16", "grad_accum_dtype": "bf16", "master_dtype": ["bf16", "none"],
    "early_stopping_patience": 1, "early_stopping_metric": "loss", "early_stopping_min_delta": 0.1,
    "callback": "early_stopping:patience=1", "spike_window": 4, "spike_zscore": 0.5, "rollback_limit": 2,
    "loss": "squares", "adapter_method": "slower",
    "report_to": "tensorboard", "profile": 1, "profile_file": "runs/t.json",
    "base_dtype": ["bf16", "nf4"], "lora_bias": "all", "lora_init": ["gaussian", "pissa"],
}
# fmt: on
# What matters once something happens: an earlier run, numbers that are not finite, copies that lose much, bad or long
# rows; or on a terminal.
STOPPING = ("early_stopping_patience", "early_stopping_metric", "early_stopping_min_delta")
FAULTS = ("on_nonfinite", "debug_nan", "on_spike", "spike_window", "spike_zscore", "rollback_limit")
EVENTS = {"callback", "overwrite", "export_anyway", "fp8_fallback", "skip_bad_rows", "overlong", *STOPPING, *FAULTS}
EVENTS |= {"panel"}
VARIES = {"time", "time_ms", "wait_ms", "sol", "memory_mib", "tps", "started", "system", "options", "algorithms"}


@dataclass(frozen=True)
class Slower(NoAdapters):
    """A plug-in: all rows learn at half the rate."""

    @classmethod
    def of_options(cls, options, config, steps):
        return cls()

    def rows(self, rows, config):
        return tuple(replace(row, rate=0.5) for row in rows)


llmq.register("method", "slower", Slower)
llmq.register("loss", "squares", lambda xp, logits, targets: ((logits * logits).sum(axis=1) / 2, logits))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with weights and a tokenizer, an adapter, token files, and rows, each twice."""
    path = tmp_path_factory.mktemp("every-option")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        rng = np.random.default_rng(0)
        for name, count in (("train", 60), ("other", 50), ("eval", 20)):
            with TokenWriter(f"{name}.bin", vocab_size=VOCAB, has_masks=True) as file:
                for length in rng.integers(4, 14, count):
                    ids = (rng.zipf(1.5, length) % VOCAB).astype(np.int32)
                    file.append(ids, rng.random(length) < 0.9, stops=[length])
        for name, count in (("rows", 60), ("other", 50)):
            rows = [{"question": f"{n}+{n % 7}?", "answer": f"{n + n % 7}."} for n in range(count)]
            Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = byte_level()
        tokenizer.decoder = decoders.ByteLevel()
        save(tokenizer, Path("source"), {"eos_token": EOS})
        save(tokenizer, Path("tokenizer"), {"eos_token": EOS, "chat_template": "{{ messages }}"})
        Path("source/config.json").write_text(json.dumps(to_hf(tiny(num_layers=2, vocab_size=VOCAB), "fp32")))
        write_weights("source", Path("base"), tokenizer=Path("source"))
        shutil.copytree("base", "again")
        Path("chat.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
        Path("prompt.jinja").write_text("Q {{ question }}")
        Path("prompts.txt").write_text("It is\n")
        Path("tokens.txt").write_text("<new>\n")
        llmq.train(**{**BASE, "lora_rank": 2, "out_dir": "adapter"}, console=io.StringIO())
    return path


@pytest.fixture(scope="module")
def unchanged():
    """By run, the plan and the results of one with no other option."""
    return {}


@pytest.fixture
def walk(folder, unchanged, monkeypatch):
    """Finds the values without effect, by name, of these options in one of the runs above."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(folder / "cache"))
    plans = []

    def prepare(*about, real=train.prepare, **more):
        job = real(*about, **more)
        plans.append(job.plan)
        return job

    monkeypatch.setattr(train, "prepare", prepare)

    def seen(options, size):
        """All that a run leaves and prints, but times and the list of its options; an error is that alone."""
        shutil.rmtree("runs", ignore_errors=True)
        plans.clear()
        consoles = [io.StringIO() for _ in range(size)]
        try:
            parsed = Options.parse(options)
            if size == 1:
                train.run(parsed, console=consoles[0])
            else:
                run_ranks(size, lambda world: train.run(parsed, console=consoles[world.rank], ranks=Ranks(world)))
        except LlmqError as error:
            return str(error)
        calls = [(name, program.calls, program.places) for name, program in plans[0].programs.items()]
        plan = hashlib.sha256(repr((calls, plans[0].persistent)).encode()).hexdigest()
        return plan, _lines(consoles[0].getvalue()), _files(Path("runs"))

    def silent(keys, run):
        given = {key: value for key, value in {**BASE, **RUNS[run]}.items() if value is not None}
        dry, size = {**given, "dry_run": True}, 2 if run.startswith("ranks") else 1
        if run not in unchanged:
            _, planned, trained = seen(given, size), seen(dry, 1), seen(given, size)  # the first one tokenizes
            assert seen(given, size) == trained and not isinstance(trained, str), trained
            unchanged[run] = planned, trained
        planned, trained = unchanged[run]
        found, flat = [], Options.parse(given).to_flat()
        for key, value in [(name, one) for name in keys for one in _values(name) if one != flat[name]]:
            if size == 1 and key != "dry_run" and seen({**dry, key: value}, 1) != planned:
                continue
            if seen({**given, key: value}, size) == trained:
                found.append(f"{key}={value}")
        return found

    return silent


def _lines(text):
    """The console's lines, but for numbers, which the files have, and the list of options; in no order, as a checkpoint
    is reported when it is complete."""
    sections = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
    kept = "".join(part for part in sections if not part.startswith(("[Options", "[System")))
    return sorted(re.sub(r"\s*-?[\d.,]+", "#", line) for line in kept.splitlines())


def _files(folder):
    """The files of a run with what is in them, as far as it is the same in each run."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.suffix == ".jsonl":
            found[str(path)] = sorted(json.dumps(_steady(json.loads(line))) for line in path.read_text().splitlines())
        elif path.suffix in (".safetensors", ".txt") or path.name in ("config.json", "tokenizer_config.json"):
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[str(path)] = ""
    return found


def _steady(record):
    if "allocator" in record:
        record["allocator"] = {k: v for k, v in record["allocator"].items() if k not in ("Free", "Reserved")}
    return {key: value for key, value in record.items() if key not in VARIES}


def _values(key):
    d = descriptions()[key]
    if key not in VALUES:
        return [True, False] if d.kind == "flag" else d.choices
    return VALUES[key] if isinstance(VALUES[key], list) and d.kind != "repeatable" else [VALUES[key]]


def _keys():
    return [key for key in descriptions() if key not in EVENTS]


@pytest.mark.parametrize("key", descriptions())
def test_every_option_has_a_value_to_walk_with(key):
    """A bad one would be refused in every run, which proves nothing."""
    d = descriptions()[key]
    assert _values(key)
    for value in _values(key):
        SECTIONS[d.section](**{"model": "base"} if d.section == "model" and key != "model" else {}, **{d.field: value})


@pytest.mark.quick("sharding")
@pytest.mark.parametrize("section", SECTIONS)
def test_no_option_is_silent(walk, section):
    assert walk([key for key in _keys() if descriptions()[key].section == section], PLAIN) == []


@pytest.mark.parametrize(
    ("run", "third"),
    [
        pytest.param(run, third, marks=pytest.mark.slow if THIRDS.get(run) == third else pytest.mark.sweep)
        for run in RUNS
        if run != PLAIN
        for third in range(3)
    ],
)
def test_no_option_is_silent_in_another_run(walk, run, third):
    keys = [key for key in _keys() if key != "launcher" or not run.startswith("ranks")]  # which are threads here
    assert walk(keys[third::3], run) == []


def test_the_walk_finds_a_silent_option(walk, monkeypatch):
    monkeypatch.setattr(without_effect, "TABLE", ())
    assert walk(["zero_level", "beta_1"], PLAIN) == ["zero_level=3"]
