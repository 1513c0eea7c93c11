"""`llmq-bench`: how fast this machine trains a model shape, and where the time goes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from llmq.cli import shell


@click.command("llmq-bench", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--models", default="Qwen2.5-0.5B", show_default=True, help="Presets or folders, with commas between.")
@click.option(
    "--dtypes", default="bf16", show_default=True, help="Matmul dtypes, with commas between: fp32, bf16, e4m3."
)
@click.option("--batch-size", type=click.IntRange(1), default=32, show_default=True, help="Sequences in a micro-batch.")
@click.option("--seq-len", type=click.IntRange(1), default=1024, show_default=True, help="Tokens in a sequence.")
@click.option(
    "--tokens-per-step", type=click.IntRange(1), default=524288, show_default=True, help="Tokens in an optimizer step."
)
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Optimizer steps to time.")
@click.option("--warmup", type=click.IntRange(0), default=3, show_default=True, help="Steps before them.")
@click.option("--recompute", default="", help="Recompute flags without their prefix, with commas between: ffn,att.")
@click.option("--lmhead-chunks", type=click.IntRange(0), default=0, help="Chunks of the logits; 0 chooses.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--save", type=click.Path(dir_okay=False), help="Write the results as JSON.")
def command(models: str, dtypes: str, device: str, save: str | None, **numbers: Any) -> int:
    """Time training from scratch on generated tokens.

    \b
    llmq-bench --models Qwen2.5-0.5B,Qwen2.5-1.5B
    llmq-bench --models Qwen2.5-7B --batch-size 16

    Weights and moments are bf16 (fp32 with --dtypes fp32). The command prints tokens per second, the share of the speed
    of light, memory, and the milliseconds of a micro-batch by family of ops, each run eagerly once.
    """
    from llmq.report.bench_table import run

    return run(models.split(","), dtypes.split(","), device, save, **numbers)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    sys.exit(shell.run(command, arguments))


if __name__ == "__main__":
    main()
