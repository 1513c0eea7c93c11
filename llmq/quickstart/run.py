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

import numpy as np
from tokenizers import Tokenizer

import llmq
from llmq.data.tokens.token_file import TokenFile
from llmq.disk import write_whole
from llmq.engine.generate import complete, open_engine
from llmq.errors import NonFiniteError
from llmq.hardware import device
from llmq.hardware.device import Device, num_cores
from llmq.model.config import from_folder
from llmq.model.parameters import num_parameters, parameter_rows
from llmq.options.parse import Options
from llmq.plan import precision
from llmq.quickstart import corpus
from llmq.quickstart.gpu import OnGpu, fit_to_card, measured_on
from llmq.quickstart.installed import installed_bytes
from llmq.quickstart.settings import SEED, Places, Settings, config, options
from llmq.report.plot import plot_runs
from llmq.report.read import read_log
from llmq.training.loop import TrainResult, Watch, train

Follow = Callable[[int], AbstractContextManager[Watch]]


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
    sol: float  # share of the speed of light of the cores, or of the GPU, that were computed on
    used_cores: int
    num_cores: int
    eval_loss: float
    unigram_entropy: float
    seconds: float
    before: str
    after: str
    on_gpu: OnGpu | None = None

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


def quickstart(
    places: Places, settings: Settings, *, tell: Callable[[str], None], follow: Follow
) -> tuple[Outcome, bool]:
    """Makes everything of `places` that is not there yet; returns the outcome and whether all of it was there.

    `tell` takes one line at the start of each stage; `follow(steps)` is entered around the training and gives what
    watches its records. Raises LlmqError, and Interrupted when the training was asked to end.
    """
    began, out = time.perf_counter(), places.out
    where = device.pick(settings.device)
    tell("Reading the sources of Python's standard library" + " and of the packages here" * settings.packages)
    text = corpus.standard_library(settings.text_bytes)
    if settings.packages:
        text = corpus.with_packages(text, settings.text_bytes)
    facts = (asdict(settings), text.sha256, llmq.__version__, where.gpu.name if where.gpu else None)
    made_from = hashlib.sha256(repr(facts).encode()).hexdigest()
    if (earlier := _earlier(places, made_from)) is not None:
        return earlier, True
    if _read(out / "made-from") != made_from:
        for stale in (places.run, places.model, out / "text", out / "data", out / "tokenizer", out / "resume"):
            shutil.rmtree(stale, ignore_errors=True)
        places.fitted.unlink(missing_ok=True)
        tell(f"Training a tokenizer of {settings.vocab_size} tokens on {text.num_bytes / 1e6:.1f} MB, and tokenizing")
        corpus.make_token_files(text, out, settings.vocab_size, settings.seq_len)
        write_whole(places.shape / "config.json", json.dumps(config(settings), indent=1).encode())
        write_whole(out / "made-from", made_from.encode())

    tokenizer = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))
    tell("Completing a prompt with the untrained model")
    before = sample(settings, tokenizer, places.shape, from_scratch=True)
    settings = fit_to_card(settings, places, where, tell)
    first_step_s = trained(settings, places, where, tell, follow)
    tell("Completing the same prompt with the exported model, and drawing the curves")
    after = sample(settings, tokenizer, places.model)
    plot_runs([read_log(places.log)], places.plot)
    log = read_log(places.log)
    rate = float(np.median(log.train["tps"]))
    on_gpu = None
    if settings.fit:
        tell(f"Measuring the GPU's speed for {settings.fit.bench_seconds:.0f} s")
        on_gpu = measured_on(settings, places, where, rate)
    outcome = Outcome(
        num_parameters=num_parameters(parameter_rows(from_folder(places.model))),
        train_tokens=TokenFile.open(places.train_file).num_tokens,
        eval_tokens=TokenFile.open(places.eval_file).num_tokens,
        text_files=len(text.texts),
        text_bytes=text.num_bytes,
        installed_bytes=installed_bytes(),
        first_step_s=first_step_s,
        tokens_per_second=rate,
        sol=float(np.median(log.train["sol"])),
        used_cores=used_cores(),
        num_cores=num_cores(),
        eval_loss=float(log.eval["loss"][-1]),
        unigram_entropy=corpus.unigram_entropy(places.eval_file),
        seconds=time.perf_counter() - began,
        before=before,
        after=after,
        on_gpu=on_gpu,
    )
    write_whole(places.outcome, json.dumps({"made_from": made_from, **asdict(outcome)}, indent=1).encode())
    return outcome, False


def trained(
    settings: Settings, places: Places, where: Device, tell: Callable[[str], None], follow: Follow
) -> float | None:
    """Trains and exports, going on from a checkpoint that is there; seconds to the first step, if there was one."""
    chosen = options(settings, places)
    if any((places.run / "checkpoints").glob("step-*")):
        chosen["continue"] = "auto"
    name = where.gpu.name if where.gpu else "CPU"
    tell(f"Training for {settings.steps} steps of {settings.tokens_per_step} tokens on the {name}")
    places.run.mkdir(parents=True, exist_ok=True)
    with open(places.run / "console.txt", "a", encoding="utf-8") as console, follow(settings.steps) as watch:
        result = train(watch=watch, console=console, **chosen)
    if result.exit_code == NonFiniteError.exit_code:
        raise NonFiniteError("\n".join(result.warnings))
    if result.exit_code:
        raise Interrupted(result)
    return None if math.isnan(result.first_step_s) else result.first_step_s


def sample(settings: Settings, tokenizer: Tokenizer, folder: Path, *, from_scratch: bool = False) -> str:
    """What the model in `folder`, or the one drawn for its shape, writes after the prompt."""
    chosen = Options.parse({"model": str(folder), "train_file": "none", "model_dtype": settings.model_dtype})
    engine = open_engine(
        folder,
        seq_len=settings.seq_len,
        from_scratch=from_scratch,
        seed=SEED,
        device=settings.device,
        precision=precision.resolve(chosen.precision, from_folder(folder)),
    )
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
    if saved.pop("made_from", None) != made_from or not there:
        return None
    on_gpu = saved.pop("on_gpu")
    return Outcome(**saved, on_gpu=OnGpu(**on_gpu) if on_gpu else None)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
