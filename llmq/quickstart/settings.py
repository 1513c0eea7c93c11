"""The quickstart's settings: what is trained, for how long, on the CPU or on a GPU, and where everything lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq.model.config_keys import TORCH_NAMES

SEED = 0


@dataclass(frozen=True)
class Fit:
    """On a GPU: `steps` are the most, and `batch_size` is halved, with more accumulation, until the plan has room."""

    train_seconds: float = 60.0  # of training, by a measured rate
    least_steps: int = 200
    trial_steps: int = 5  # of that measurement
    bench_seconds: float = 20.0  # measured after the training
    verdict_model: str = "llama3_8b"  # preset to plan for


@dataclass(frozen=True)
class Settings:
    """Sizes of the data, the model and the run; the defaults are those of the CPU."""

    device: str = "cpu"
    model_dtype: str = "fp32"
    text_bytes: int = 8_000_000
    packages: bool = False  # whether the sources of installed packages are text, too
    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 3
    num_heads: int = 6
    num_kv_heads: int = 2
    tie_embeddings: bool = False
    seq_len: int = 128
    batch_size: int = 8
    grad_accumulation: int = 1
    steps: int = 600
    learning_rate: float = 2e-3
    prompt: str = "class Reader:\n    def __init__(self, "
    new_tokens: int = 60
    least_gain: float = 1.0  # nats per token that the held-out loss has to be below the unigram entropy
    fit: Fit | None = None  # how batch and steps follow from the card

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step."""
        return self.batch_size * self.seq_len * self.grad_accumulation


# 57 million parameters: the blocks of the preset tiny_llama3_150m. The least steps have 6.6 million tokens, which takes
# some minutes on a slow card; the most have 49 million, the text six to seven times, and more would teach it little.
GPU = Settings(
    device="cuda",
    model_dtype="bf16",
    text_bytes=30_000_000,
    packages=True,
    vocab_size=8192,
    hidden_size=768,
    intermediate_size=2048,
    num_layers=8,
    num_heads=12,
    num_kv_heads=4,
    tie_embeddings=True,
    seq_len=512,
    batch_size=64,
    steps=1500,
    learning_rate=1e-3,
    fit=Fit(),
)


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

    @property
    def fitted(self) -> Path:
        """What was chosen for this card."""
        return self.out / "fitted.json"


def options(settings: Settings, places: Places) -> dict[str, Any]:
    """The options of `llmq-train` for the quickstart's run."""
    return {
        "model": str(places.shape),
        "from_scratch": True,
        "model_dtype": settings.model_dtype,
        "master_dtype": "fp32",
        "train_file": str(places.train_file),
        "eval_file": str(places.eval_file),
        "seq_len": settings.seq_len,
        "batch_size": settings.batch_size,
        "grad_accumulation": settings.grad_accumulation,
        "steps": settings.steps,
        "learning_rate": settings.learning_rate,
        "warmup": settings.steps // 10,
        "lr_schedule": "cosine",
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
        "device": settings.device,
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
        "tie_word_embeddings": settings.tie_embeddings,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": TORCH_NAMES[settings.model_dtype],
        "torch_dtype": TORCH_NAMES[settings.model_dtype],
    }
