"""The quickstart's way from text to a trained model, in stages that a second call finds done."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import llmq
from llmq.config import from_folder
from llmq.data.token_file import TokenFile, write_whole
from llmq.device import cuda_problem, num_cores
from llmq.generate import complete, open_engine
from llmq.quickstart import corpus
from llmq.quickstart.installed import installed_bytes
from llmq.report.plot import plot_runs
from llmq.report.read import read_log
from llmq.rows import num_parameters, parameter_rows
from llmq.training import TrainResult, Watch, train

SEED = 0

Follow = Callable[[int], AbstractContextManager[Watch]]


@dataclass(frozen=True)
class Settings:
    """Sizes of the data, the model and the run."""

    text_bytes: int = 8_000_000
    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 3
    num_heads: int = 6
    num_kv_heads: int = 2
    seq_len: int = 128
    batch_size: int = 8
    steps: int = 600
    learning_rate: float = 2e-3
    prompt: str = "class Reader:\n    def __init__(self, "
    new_tokens: int = 60
    least_gain: float = 1.0  # nats per token that the held-out loss has to be below the unigram entropy


@dataclass(frozen=True)
class Places:
    """Where everything is, below one folder."""

    out: Path

    @property
    def shape(self) -> Path:
        """Folder with the config.json of the model to make."""
        return self.out / "shape"

    @property
    def train_file(self) -> Path:
        return self.out / "data" / "train.bin"

    @property
    def eval_file(self) -> Path:
        return self.out / "data" / "eval.bin"

    @property
    def run(self) -> Path:
        """Folder of the log and the checkpoints."""
        return self.out / "run"

    @property
    def log(self) -> Path:
        return self.run / "log.jsonl"

    @property
    def model(self) -> Path:
        return self.out / "model"

    @property
    def outcome(self) -> Path:
        return self.out / "outcome.json"

    @property
    def plot(self) -> Path:
        return self.out / "loss.png"


@dataclass(frozen=True)
class Outcome:
    """What the last screen tells. Losses and the entropy are nats per token."""

    num_parameters: int
    train_tokens: int
    eval_tokens: int
    text_files: int
    text_bytes: int
    installed_bytes: int | None
    first_step_s: float | None  # none if only the end was left to do
    tokens_per_second: float
    sol: float  # share of the speed of light of the cores that were computed on
    used_cores: int
    num_cores: int
    eval_loss: float
    unigram_entropy: float
    seconds: float
    before: str
    after: str

    @property
    def gain(self) -> float:
        """By how much the held-out loss is below the unigram entropy: what the model makes of the context."""
        return self.unigram_entropy - self.eval_loss

    @property
    def machine_sol(self) -> float:
        """Share of the speed of light of all cores, on the word that each is as fast as those that were used."""
        return self.sol * self.used_cores / self.num_cores


class Interrupted(Exception):
    """The training was asked to end; what it did is saved."""

    def __init__(self, result: TrainResult) -> None:
        super().__init__()
        self.result = result


def options(settings: Settings, places: Places) -> dict[str, Any]:
    """The options of `llmq-train` for the quickstart's run."""
    return {
        "model": str(places.shape),
        "from_scratch": True,
        "model_dtype": "fp32",
        "train_file": str(places.train_file),
        "eval_file": str(places.eval_file),
        "seq_len": settings.seq_len,
        "batch_size": settings.batch_size,
        "grad_accumulation": 1,
        "steps": settings.steps,
        "learning_rate": settings.learning_rate,
        "warmup": settings.steps // 10,
        "final_lr_fraction": 0.1,
        "eval_every_n_steps": max(settings.steps // 5, 1),
        "eval_num_steps": 4,
        "name": "quickstart",
        "log_file": str(places.log),
        "checkpoint_dir": str(places.run / "checkpoints"),
        "ckpt_interval": max(settings.steps // 4, 1),
        "ckpt_keep_n": 1,
        "out_dir": str(places.model),
        "overwrite": True,
        "device": "cpu",
        "seed": SEED,
    }


def config(settings: Settings) -> dict[str, Any]:
    """The config.json of a small Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads,
        "max_position_embeddings": settings.seq_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def quickstart(
    places: Places, settings: Settings, *, tell: Callable[[str], None], follow: Follow
) -> tuple[Outcome, bool]:
    """Makes everything of `places` that is not there yet; returns the outcome and whether all of it was there.

    `tell` takes one line at the start of each stage; `follow(steps)` is entered around the training and gives what
    watches its records. Raises LlmqError, and Interrupted when the training was asked to end.
    """
    began, out = time.perf_counter(), places.out
    tell("Reading the sources of Python's standard library")
    text = corpus.standard_library(settings.text_bytes)
    made_from = hashlib.sha256(repr((asdict(settings), text.sha256, llmq.__version__)).encode()).hexdigest()
    if (earlier := _earlier(places, made_from)) is not None:
        return earlier, True
    if _read(out / "made-from") != made_from:
        for stale in (places.run, places.model, out / "text", out / "data", out / "tokenizer", out / "resume"):
            shutil.rmtree(stale, ignore_errors=True)
        tell(f"Training a tokenizer of {settings.vocab_size} tokens on {text.num_bytes / 1e6:.1f} MB, and tokenizing")
        corpus.make_token_files(text, out, settings.vocab_size, settings.seq_len)
        write_whole(places.shape / "config.json", json.dumps(config(settings), indent=1).encode())
        write_whole(out / "made-from", made_from.encode())

    tokenizer = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))
    tell("Completing a prompt with the untrained model")
    before = sample(settings, tokenizer, places.shape, from_scratch=True)
    first_step_s = trained(settings, places, tell, follow)
    tell("Completing the same prompt with the exported model, and drawing the curves")
    after = sample(settings, tokenizer, places.model)
    plot_runs([places.log], places.plot)
    log = read_log(places.log)
    outcome = Outcome(
        num_parameters=num_parameters(parameter_rows(from_folder(places.model))),
        train_tokens=TokenFile.open(places.train_file).num_tokens,
        eval_tokens=TokenFile.open(places.eval_file).num_tokens,
        text_files=len(text.texts),
        text_bytes=text.num_bytes,
        installed_bytes=installed_bytes(),
        first_step_s=first_step_s,
        tokens_per_second=float(np.median(log.train["tps"])),
        sol=float(np.median(log.train["sol"])),
        used_cores=used_cores(),
        num_cores=num_cores(),
        eval_loss=float(log.eval["loss"][-1]),
        unigram_entropy=corpus.unigram_entropy(places.eval_file),
        seconds=time.perf_counter() - began,
        before=before,
        after=after,
    )
    write_whole(places.outcome, json.dumps({"made_from": made_from, **asdict(outcome)}, indent=1).encode())
    return outcome, False


def trained(settings: Settings, places: Places, tell: Callable[[str], None], follow: Follow) -> float | None:
    """Trains and exports, going on from a checkpoint that is there; seconds to the first step, if there was one."""
    chosen = options(settings, places)
    if any((places.run / "checkpoints").glob("step-*")):
        chosen["continue"] = "auto"
    gpu = "" if cuda_problem() else " (the quickstart does not use the GPU yet)"
    tell(f"Training for {settings.steps} steps of {settings.batch_size * settings.seq_len} tokens on the CPU{gpu}")
    places.run.mkdir(parents=True, exist_ok=True)
    with open(places.run / "console.txt", "a", encoding="utf-8") as console, follow(settings.steps) as watch:
        result = train(watch=watch, console=console, **chosen)
    if result.exit_code:
        raise Interrupted(result)
    return None if math.isnan(result.first_step_s) else result.first_step_s


def sample(settings: Settings, tokenizer: Tokenizer, folder: Path, *, from_scratch: bool = False) -> str:
    """What the model in `folder`, or the one drawn for its shape, writes after the prompt."""
    engine = open_engine(folder, seq_len=settings.seq_len, from_scratch=from_scratch, seed=SEED)
    tokens = complete(
        engine, tokenizer.encode(settings.prompt).ids, settings.new_tokens, temperature=0.7, seed=SEED, stop=0
    )
    return tokenizer.decode(tokens)


def used_cores() -> int:
    """Cores that NumPy's matrix product computes on in this process."""
    return min(int(os.environ.get("OPENBLAS_NUM_THREADS") or num_cores()), num_cores())


def _earlier(places: Places, made_from: str) -> Outcome | None:
    """The outcome of an earlier call that made the same, if all of it is still there."""
    try:
        saved = json.loads(places.outcome.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    there = all(path.exists() for path in (places.model / "model.safetensors", places.plot, places.log))
    return Outcome(**saved) if saved.pop("made_from", None) == made_from and there else None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
