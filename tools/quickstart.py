"""From this machine's Python sources to a trained model, with llmq's own commands; each is printed before it runs.

`bash tools/quickstart.sh` makes the environment that this runs in. A later call resumes where an earlier one ended, or
shows the results of one that finished, without a network.
"""

import glob
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import llmq
from llmq.data.tokens.token_file import TokenFile
from llmq.errors import MemoryLimitError
from llmq.hardware.cores import num_cores
from llmq.hardware.device import pick
from llmq.report.read import read_log

BIN = os.path.relpath(Path(sys.executable).parent)
LIBRARY, PACKAGES = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
PROMPT = "class Reader:\n    def __init__(self, "
LEAST_GAIN = 1.0  # nats per token that the held-out loss has to be below the unigram entropy
TRAIN_S, LEAST_STEPS = 60, 200  # on a GPU
STEPS = r"\[[TV]\]|Checkpoint|Exported"  # lines of llmq-train to show


@dataclass(frozen=True)
class Setup:
    """What is trained: `sizes` has the model's config.json and, in train.yaml, options of llmq-train."""

    sizes: Path
    inputs: tuple[str, ...]
    device: str = "cpu"
    out: Path = Path("out/quickstart")
    fit: str = ""  # options that follow from the GPU's memory and speed

    def options(self) -> dict[str, Any]:
        """The options of llmq-train in train.yaml."""
        return dict(yaml.safe_load((self.sizes / "train.yaml").read_text("utf-8")))

    def train(self, folder: Path) -> str:
        """The command that trains, from the newest checkpoint in `folder` if there is one, and exports the model."""
        return (
            f"{BIN}/llmq-train --config={self.sizes}/train.yaml{self.fit} --model={self.sizes} --device={self.device} "
            f"--train-file={self.out}/data/train.bin --eval-file={self.out}/data/eval.bin --continue=auto "
            f"--log-file={folder}/log.jsonl --checkpoint-dir={folder}/checkpoints --out-dir={folder}/model --overwrite"
        )


def run(command: str, *, shown: str = "", kill_at: str = "", codes: tuple[int, ...] = (0,)) -> tuple[int, float]:
    """Prints and runs a command, shows the lines of its output that match `shown`, and kills it at a line `kill_at`.

    Returns its exit code, and the seconds to its first training step. A code that is not in `codes` ends this process.
    """
    print(f"\n$ {command}", flush=True)
    began, first = time.perf_counter(), math.nan
    with subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, text=True, errors="replace") as child:
        try:
            for line in child.stdout or ():
                if math.isnan(first) and line.startswith("[T]"):
                    first = time.perf_counter() - began
                if re.match(shown, line):
                    print(line, end="", flush=True)
                if kill_at and re.match(kill_at, line):
                    print(f"\n$ kill -KILL {child.pid}", flush=True)
                    child.kill()
                    break
        except KeyboardInterrupt:  # the command has it too: llmq-train saves a checkpoint
            child.wait()
    if child.returncode not in codes:
        print(f"exit code {child.returncode}: the same call of the quickstart resumes there", flush=True)
        sys.exit(abs(child.returncode))
    return child.returncode, first


def train_tokenizer(texts: Sequence[str], vocab_size: int, folder: Path) -> None:
    """Writes a byte-level BPE tokenizer of `vocab_size` tokens, the first of which ends a text."""
    tokenizer, eos = Tokenizer(models.BPE()), "<|endoftext|>"
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    about = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    files = (file for text in texts for file in sorted(glob.glob(text, recursive=True)))
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[eos], **about)
    tokenizer.train_from_iterator((Path(file).read_text("utf-8") for file in files), trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "bos_token": eos}), "utf-8")


def make_data(setup: Setup, gpu: str | None) -> None:
    """Makes the token files and their tokenizer; first removes `out` if it was made with other settings."""
    out, stamp = setup.out, setup.out / "made-from"
    config = json.loads((setup.sizes / "config.json").read_text("utf-8"))
    made_from = repr((config, setup.options(), setup.inputs, gpu, llmq.__version__, sys.version))
    if not stamp.exists() or stamp.read_text("utf-8") != made_from:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        stamp.write_text(made_from, "utf-8")
    if not (out / "data" / "train.bin").exists():
        inputs = " ".join(f"--input={shlex.quote(text)}" for text in setup.inputs)
        train_tokenizer(setup.inputs, config["vocab_size"], out / "tokenizer")
        run(f"{BIN}/tokenize-data {inputs} --model={out}/tokenizer --eval-fraction=0.05 --out-dir={out}/data")


def fitted(setup: Setup) -> Setup:
    """`setup` with the batch that this GPU has room for, and as many steps as take TRAIN_S, by llmq-bench."""
    saved, options = setup.out / "bench.json", setup.options()
    tokens_per_step = options["seq_len"] * options["batch_size"] * options["grad_accumulation"]
    if not saved.exists():
        dtypes = "--dtypes=bf16 --master-dtype=fp32 --opt-m-dtype=fp32 --opt-v-dtype=fp32"
        tokens = f"--seq-len={options['seq_len']} --tokens-per-step={tokens_per_step}"
        run(f"{BIN}/llmq-bench --models={setup.sizes} {dtypes} {tokens} --steps=100 --save={saved}")
    found = json.loads(saved.read_text("utf-8"))["results"][0]
    steps = int(TRAIN_S * found["tokens_per_second"]["median"] / tokens_per_step)
    steps, batch = min(max(steps, LEAST_STEPS), options["steps"]), found["batch_size"]
    accumulation = tokens_per_step // (batch * options["seq_len"])
    return replace(setup, fit=f" --steps={steps} --batch-size={batch} --grad-accumulation={accumulation}")


def completion(setup: Setup, folder: Path, *, from_scratch: bool = False) -> str:
    """PROMPT and what the model in `folder` writes after it, each line behind a bar."""
    command = [f"{BIN}/llmq-generate", f"--model={folder}", f"--tokenizer={setup.out}/data/tokenizer"]
    command += [f"--prompt={PROMPT}", "--max-tokens=60", "--temperature=0.7", f"--device={setup.device}"]
    command += ["--from-scratch"] * from_scratch
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, errors="replace", check=True).stdout
    return "".join(f"\n  | {line}" for line in (PROMPT + text.removesuffix("\n")).split("\n"))


def results(setup: Setup, first_step_s: float, began: float) -> tuple[str, float]:
    """The last screen, and by how many nats the held-out loss is below the unigram entropy."""
    out, log, model = setup.out, read_log(setup.out / "run"), setup.out / "run" / "model"
    data, again, options = out / "data", out.parent / "again", setup.options()
    train, held_out = (TokenFile.open(data / name) for name in ("train.bin", "eval.bin"))
    shares = np.unique(held_out.tokens, return_counts=True)[1] / held_out.num_tokens
    entropy, loss = float(-(shares * np.log(shares)).sum()), float(log.eval["loss"][-1])
    installed = sum(p.stat().st_size for p in Path(PACKAGES).rglob("*") if p.is_file() and p.suffix != ".pyc")
    sol, cores = 100 * float(np.median(log.train["sol"])), num_cores()
    used = min(int(os.environ.get("OPENBLAS_NUM_THREADS") or cores), cores)
    on_cpu = f" of the {used} of {cores} cores in use, {sol * used / cores:.1f}% of the machine's"
    text = f"""
Made:
  text    {train.num_documents + held_out.num_documents} Python files of this machine
  tokens  {data!s:<30} {train.num_tokens:,} to train on, {held_out.num_tokens:,} held out
  model   {model!s:<30} {log.header["model"]["parameters"] / 1e6:.1f} million parameters, a Hugging Face folder
  curves  {out / "loss.png"!s:<30} loss, learning rate, norm and speed
  log     {log.path!s:<30} JSON lines

Measured:
  installed                    {installed / 1e6:.0f} MB, without torch
  seconds to the first step    {"taken by an earlier call" if math.isnan(first_step_s) else f"{first_step_s:.1f}"}
  tokens/s                     {np.median(log.train["tps"]):.0f}
  share of the speed of light  {sol:.1f}%{on_cpu if setup.device == "cpu" else ""}
  held-out loss                {loss:.3f} nats per token
  unigram entropy              {entropy:.3f} nats per token: the loss is {entropy - loss:.3f} below
  all of it took               {time.perf_counter() - began:.0f} s

Completed by the untrained model:{completion(setup, setup.sizes, from_scratch=True)}

Completed by the trained model:{completion(setup, model)}

Try next:
  # Train the model further
  {BIN}/llmq-train --model={model} --train-file={data}/train.bin --eval-file={data}/eval.bin \
--model-dtype={options["model_dtype"]} --seq-len={options["seq_len"]} --steps=20 --lr=3e-4 \
--log-file={again}/log.jsonl --checkpoint-dir={again}/checkpoints --out-dir={again}/model
  # Draw its curves
  {BIN}/llmq-plot {out}/run -o {out.parent}/curves.svg
  # Make token files of your own text
  {BIN}/tokenize-data --input='{LIBRARY}/json/*.py' --tokenizer={model} --out-dir={out.parent}/my-data
"""
    return text, entropy - loss


def gpu_results(out: Path) -> str:
    """The GPU's speed, and whether a large model fits into its memory."""
    found = json.loads((out / "bench.json").read_text("utf-8"))["results"][0]
    command = f"{BIN}/llmq-train --model=llama3_8b --from-scratch --train-file={out}/data/train.bin --dry-run"
    code, _ = run(command, shown=r"\[Alloc|  .* MiB", codes=(0, MemoryLimitError.exit_code))
    return f"""
This GPU:
  {found["tokens_per_second"]["median"]:,.0f} tokens/s by llmq-bench, {100 * found["sol"]:.1f}% of the speed of light; \
its first step took {found["first_step_s"]:.1f} s, with kernels compiled
  Llama-3-8B {"does not fit" if code else "fits"}, says llmq-train --dry-run above
"""


def resumed(setup: Setup) -> tuple[str, bool]:
    """Trains again, kills the training midway, resumes it, and compares the weights."""
    again, steps = setup.out / "resume", read_log(setup.out / "run").train["step"]
    shutil.rmtree(again, ignore_errors=True)
    at = int(steps[len(steps) * 2 // 3])
    run(setup.train(again), shown=STEPS, kill_at=rf"\[T\] step +{at} ", codes=(-signal.SIGKILL,))
    run(setup.train(again), shown=STEPS)
    saved = next(event["step"] for event in read_log(again).events if event["type"] == "resume")
    files = [folder / "model" / "model.safetensors" for folder in (setup.out / "run", again)]
    whole, continued = (hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    text = f"""
Killed after step {at}, resumed from the checkpoint of step {saved}:
  weights of the uninterrupted run  sha256 {whole}
  weights of the resumed run        sha256 {continued}
  {"the same bits" if whole == continued else "NOT the same"}
"""
    return text, whole == continued


def quickstart(setup: Setup, *, gpu: str | None = None, show_resume: bool = False) -> int:
    """Makes what is not there yet, prints the last screen, and returns 1 if it does not show what it should."""
    began, out, screen = time.perf_counter(), setup.out, setup.out / "screen.txt"
    make_data(setup, gpu)
    setup = fitted(setup) if gpu else setup
    if all(path.exists() for path in (screen, out / "run" / "model" / "model.safetensors", out / "loss.png")):
        text, gain = screen.read_text("utf-8"), math.inf
    else:
        _, first_step_s = run(setup.train(out / "run"), shown=STEPS)
        run(f"{BIN}/llmq-plot {out}/run -o {out}/loss.png")
        on_gpu = gpu_results(out) if gpu else ""  # before this process takes memory of the GPU for the completions
        text, gain = results(setup, first_step_s, began)
        text += on_gpu
        if gain >= LEAST_GAIN:
            screen.write_text(text, "utf-8")
    told, same = resumed(setup) if show_resume else ("", True)
    print(text + told, end="", flush=True)
    return 0 if gain >= LEAST_GAIN and same else 1


def main() -> int:
    """What tools/quickstart.sh calls with its arguments."""
    sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal's encoding lacks
    where = pick("cpu" if "--cpu" in sys.argv else "auto")
    print(f"{where.note}\n" if where.note else "", end="")
    setup = Setup(Path("tools/quickstart/cpu"), (f"{LIBRARY}/*.py",))
    if where.gpu:
        more = (f"{PACKAGES}/{name}/**/*.py" for name in ("huggingface_hub", "matplotlib", "numpy", "pyarrow"))
        setup = replace(setup, sizes=Path("tools/quickstart/gpu"), inputs=(*setup.inputs, *more), device="cuda")
    return quickstart(setup, gpu=where.gpu and where.gpu.name, show_resume="--show-resume" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
