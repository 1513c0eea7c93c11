"""`llmq-estimate`: what a run would take of a card that need not be here, without data and without weights."""

import sys
from typing import Any

import click

from llmq.cli import shell
from llmq.cli.train import option_elsewhere
from llmq.options.parse import Options, descriptions
from llmq.screen import Screen

SECTIONS = ("precision", "memory", "sharding", "adapters", "optimizer")
SINGLE = (
    *("model", "tokenizer", "vocab_size", "gpu", "gpus", "memory_limit", "host_memory_limit", "batch_size"),
    *("global_batch_size", "grad_accumulation", "seq_len", "deterministic", "debug_memory"),
)


def _options() -> list[click.Parameter]:
    """Those of llmq-train that a plan depends on."""
    found: list[click.Parameter] = []
    for d in descriptions().values():
        if d.section in SECTIONS or d.key in SINGLE:
            option = option_elsewhere(d)
            option.required = d.key in ("model", "gpu")
            found.append(option)
    about = (
        "Estimate the longest sequence, one in a step, that fits in the settings that are given. Tiles and chunks of "
        "logits that are not given are of 8,192 and 4,096 tokens."
    )
    return [*found, click.Option(["--longest"], is_flag=True, help=about)]


def _estimate(*, longest: bool, **given: Any) -> None:
    from llmq.training.estimate import estimate

    typed = {key: value for key, value in given.items() if value is not None}
    without_card = [] if "gpu" in typed else [f"--gpu is needed: {descriptions()['gpu'].help}"]
    options = Options.parse({**typed, "train_file": "none", "from_scratch": True, "dry_run": True}, without_card)
    for line in estimate(options, longest=longest, start_task=Screen(sys.stderr).task):
        click.echo(line)


command = click.Command(
    "llmq-estimate",
    params=_options(),
    callback=_estimate,
    context_settings=shell.SETTINGS,
    help="Plan a run on a card that need not be here, without data: bytes by segment, "
    "host memory, disk, and a modelled step time. Nothing but the model's config.json is "
    "downloaded. The exit code is 4 where the run does not fit.",
    epilog="Example: llmq-estimate --model Qwen/Qwen2.5-7B --gpu 'RTX 4090' --batch-size 1 --recompute-block",
)
shell.version_option(command)

if __name__ == "__main__":
    shell.main(command)
