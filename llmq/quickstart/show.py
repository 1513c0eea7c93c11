"""What the quickstart says: a line per stage, the training as it goes, and the last screen."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from llmq.quickstart.gpu import OnGpu, verdict_options
from llmq.quickstart.resume import Resumed, arguments
from llmq.quickstart.run import Outcome
from llmq.quickstart.settings import Places, Settings
from llmq.training.loop import Watch
from llmq.training.records import EvalRecord, TrainRecord

PLAIN_EVERY_S = 5.0  # seconds from one plain line to the next


def say(text: str = "") -> None:
    """Lines on stdout, at once; what its encoding lacks is escaped."""
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def tell(stage: str) -> None:
    """The start of a stage."""
    say(f"==> {stage}")


class Lines:
    """The training as plain lines: the first step, one every few seconds, each evaluation, and the end."""

    def __init__(self, steps: int) -> None:
        self.steps, self.began, self.told = steps, time.perf_counter(), -PLAIN_EVERY_S
        self.first: int | None = None

    def __call__(self, record: TrainRecord | EvalRecord) -> None:
        """Follows one record."""
        if isinstance(record, EvalRecord):
            say(f"    step {record.step:4d}/{self.steps}   held-out loss {record.loss:.3f}")
            return
        self.first = record.step - 1 if self.first is None else self.first
        now = time.perf_counter() - self.began
        if now - self.told < PLAIN_EVERY_S and record.step < self.steps:
            return
        self.told = now
        left = now / (record.step - self.first) * (self.steps - record.step)
        sol = f"   sol {100 * record.sol:4.1f}%" if record.sol is not None else ""
        say(
            f"    step {record.step:4d}/{self.steps}   loss {record.loss:.3f}   {record.tps:6.0f} tokens/s{sol}"
            f"   {left:4.0f} s left"
        )


class Bar:
    """The training as one live line on a terminal; evaluations stay above it."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self.progress, self.steps = progress, steps
        self.task = progress.add_task("", total=steps, loss="", speed="")

    def __call__(self, record: TrainRecord | EvalRecord) -> None:
        """Follows one record."""
        if isinstance(record, EvalRecord):
            self.progress.console.print(f"    step {record.step:4d}/{self.steps}   held-out loss {record.loss:.3f}")
            return
        speed = f"{record.tps:.0f} tokens/s, sol {100 * (record.sol or 0):.0f}%"
        self.progress.update(self.task, completed=record.step, loss=f"loss {record.loss:.3f}", speed=speed)


@contextmanager
def training(steps: int) -> Iterator[Watch]:
    """What follows the records of a training: a live line on a terminal, plain lines elsewhere."""
    console = Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield Lines(steps)
        return
    texts = [TextColumn(f"{{task.{name}}}") for name in ("completed", "fields[loss]", "fields[speed]")]
    columns = (TextColumn("    step"), texts[0], BarColumn(30), *texts[1:], TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        yield Bar(progress, steps)


def tool(name: str) -> str:
    """The path of a command of this environment, for a shell in this folder."""
    path = Path(sys.executable).parent / name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def commands(settings: Settings, places: Places) -> list[tuple[str, list[str]]]:
    """Three things to try next, and their commands, for a shell in this folder."""
    again = places.out / "again"
    return [
        (
            "Train the model further",
            [
                tool("llmq-train"),
                f"--model={places.model}",
                f"--train-file={places.train_file}",
                f"--eval-file={places.eval_file}",
                f"--model-dtype={settings.model_dtype}",
                f"--seq-len={settings.seq_len}",
                "--steps=20",
                "--lr=3e-4",
                f"--log-file={again / 'log.jsonl'}",
                f"--checkpoint-dir={again / 'checkpoints'}",
                f"--out-dir={again / 'model'}",
            ],
        ),
        ("Draw its curves", [tool("llmq-plot"), str(places.log), "-o", str(places.out / "curves.svg")]),
        (
            "Make token files of your own text",
            [
                tool("tokenize-data"),
                f"--input={places.out / 'text' / 'a*.py'}",
                f"--tokenizer={places.model}",
                f"--out-dir={places.out / 'my-data'}",
            ],
        ),
    ]


def last_screen(settings: Settings, places: Places, outcome: Outcome, *, cached: bool) -> list[str]:
    """What was made and where, what was measured, the prompt before and after, and what to try next."""
    mb = f"{outcome.installed_bytes / 1e6:.0f} MB, without torch" if outcome.installed_bytes else "run from the source"
    first = f"{outcome.first_step_s:.1f}" if outcome.first_step_s is not None else "continued from a checkpoint"
    if outcome.on_gpu:
        first += f" ({outcome.on_gpu.cold_first_step_s:.1f} before, while kernels were compiled and algorithms chosen)"
    made = (
        ("text", places.out / "text", f"{outcome.text_files} Python files, {outcome.text_bytes / 1e6:.1f} MB"),
        ("tokens", places.train_file.parent, f"{outcome.train_tokens:,} to train on, {outcome.eval_tokens:,} held out"),
        ("model", places.model, f"{outcome.num_parameters / 1e6:.1f} million parameters, a Hugging Face folder"),
        ("curves", places.plot, "loss, learning rate, norm and speed"),
        ("log", places.log, "JSON lines"),
    )
    measured = (
        ("installed", mb),
        ("seconds to the first step", first),
        ("tokens/s", f"{outcome.tokens_per_second:.0f}"),
        ("share of the speed of light", share_of_light(outcome)),
        ("held-out loss", f"{outcome.eval_loss:.3f} nats per token"),
        ("unigram entropy", f"{outcome.unigram_entropy:.3f} nats per token: the loss is {outcome.gain:.3f} below"),
        ("all of it took", f"{outcome.seconds:.0f} s" + (" (made by an earlier call)" if cached else "")),
    )
    lines = ["", "Made:"]
    lines += [f"  {name:<7} {path!s:<30} {what}" for name, path, what in made]
    lines += ["", "Measured:"]
    lines += [f"  {name:<27} {value}" for name, value in measured]
    lines += on_gpu_lines(outcome.on_gpu, settings, places) if outcome.on_gpu else []
    for title, text in (("untrained model", outcome.before), ("trained model", outcome.after)):
        lines += ["", f"Completed by the {title}:", *("  | " + line for line in (settings.prompt + text).split("\n"))]
    lines += ["", "Try next:"]
    for title, command in commands(settings, places):
        lines += [f"  # {title}", f"  {shlex.join(command)}"]
    return lines


def share_of_light(outcome: Outcome) -> str:
    """The share, and whose light it is: the GPU's, or that of the machine and of the cores that were used."""
    if outcome.on_gpu:
        return f"{100 * outcome.sol:.1f}% of {outcome.on_gpu.peak_tflops:.4g} TFLOP/s bf16 ({outcome.on_gpu.name})"
    cores = f"{outcome.used_cores} of {outcome.num_cores}"
    return f"{100 * outcome.machine_sol:.1f}% of the machine's, {100 * outcome.sol:.1f}% of the {cores} cores in use"


def on_gpu_lines(on_gpu: OnGpu, settings: Settings, places: Places) -> list[str]:
    """The speed of the card, and what a large model would need of it."""
    assert settings.fit is not None
    command = [tool("llmq-train"), *arguments(verdict_options(settings.fit, places))]
    least, most = on_gpu.least_tokens_per_second, on_gpu.most_tokens_per_second
    return [
        "",
        f"This {on_gpu.name}:",
        f"  {on_gpu.tokens_per_second:,.0f} tokens/s ({least:,.0f} to {most:,.0f}), {100 * on_gpu.sol:.1f}% of the "
        f"speed of light, in {on_gpu.bench_seconds:.0f} s of this model's steps on generated tokens",
        f"  {on_gpu.verdict_model} {on_gpu.verdict}",
        "  # The same as a dry run, which looks at the disk, too",
        f"  {shlex.join(command)}",
    ]


def resumed_lines(resumed: Resumed) -> list[str]:
    """What came of the run that was killed."""
    return [
        "",
        f"Killed after step {resumed.killed_after}, continued from the checkpoint of step {resumed.continued_from}:",
        f"  weights of the uninterrupted run  sha256 {resumed.whole}",
        f"  weights of the continued run      sha256 {resumed.continued}",
        "  the same bits" if resumed.same else "  NOT the same",
    ]
