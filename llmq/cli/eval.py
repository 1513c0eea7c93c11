"""llmq-eval: metrics of a model on held-out data, or its results on tasks of lm-evaluation-harness."""

import json
import sys
from typing import Any

import click

from llmq.cli import shell
from llmq.cli.train import own_option
from llmq.errors import UsageError
from llmq.options.commands import GenerateOptions
from llmq.options.field import describe, section_of, with_commas
from llmq.options.parse import Options, descriptions

OF_MODEL = ("model", "revision", "adapter", "base_dtype", "device", "dtype", "batch_size", "max_tokens")
OF_ROWS = (  # options of llmq-train, with its help
    *("data_format", "map", "prompt_template", "preamble", "chat_template", "train_on", "overlong", "skip_bad_rows"),
)
METRICS = "loss,perplexity,bits_per_byte,accuracy"


@shell.version_option
@click.command(
    "llmq-eval",
    context_settings=shell.SETTINGS,
    epilog="Example: llmq-eval --model=Qwen/Qwen2.5-0.5B --data=held-out.jsonl --metrics=loss,accuracy,exact_match",
)
@click.option("--data", type=shell.Home(), metavar="NAME-OR-PATH", help="Held-out rows, text, or a token file.")
@click.option(
    "--metrics",
    metavar="NAME,...",
    help="With --data: loss, perplexity, bits_per_byte, accuracy; and of generated answers exact_match, bleu, rouge."
    f"  [default: {METRICS}]",
)
@click.option("--answers", type=shell.Home(), metavar="FILE", help="Write JSON lines of prompts with both answers.")
@click.option("--seq-len", type=click.IntRange(min=2), help="Most tokens of a row to read.  [default: 2048]")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Take the first N rows alone.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
def command(data: str | None, as_json: bool, limit: int | None, **given: Any) -> None:
    """Measures a model: how well it predicts held-out data, and how near its own answers come to those there."""
    typed = {key: value for key in OF_ROWS if (value := given.pop(key)) not in (None, ())}
    own = {key: value for key in OF_MODEL if (value := given.pop(key)) not in (None, ())}
    options = section_of(GenerateOptions, own)
    if data is None:
        raise UsageError("give --data: held-out rows, text, or a token file")
    found = _on_data(data, options, typed, limit, **given)
    click.echo(json.dumps(found) if as_json else "\n".join(f"{name:<16}{_shown(it)}" for name, it in found.items()))


def _on_data(
    data: str,
    options: GenerateOptions,
    typed: dict[str, Any],
    limit: int | None,
    *,
    metrics: str | None,
    answers: str | None,
    seq_len: int | None,
) -> dict[str, Any]:
    # Imported here, so that --help does not wait for them.
    from llmq.evaluation.held_out import evaluated
    from llmq.screen import Screen

    rows = Options.parse({"model": options.model, "data": data, "seq_len": seq_len or 2048, **typed})
    screen = Screen(sys.stderr)
    names = with_commas(metrics or METRICS)
    return evaluated(data, options, rows, names, limit, answers, say=screen.line, task=screen.task)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


command.params = [
    *(own_option(d) for d in describe("generate", GenerateOptions) if d.key in OF_MODEL),
    *command.params,
    *(own_option(descriptions()[key]) for key in OF_ROWS),
]
if __name__ == "__main__":
    shell.main(command)
