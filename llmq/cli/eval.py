"""llmq-eval: metrics of a model on held-out data, or its results on tasks of lm-evaluation-harness."""

import json
import sys
from collections.abc import Mapping
from typing import Any

import click

from llmq.cli import shell
from llmq.cli.train import option_elsewhere, own_option
from llmq.errors import UsageError
from llmq.options.commands import GenerateOptions
from llmq.options.field import describe, flag, section_of, with_commas
from llmq.options.parse import Options, descriptions

OF_MODEL = {  # options of llmq-generate, some with a help of their own
    "model": "Model to measure: a folder or a hub name.",
    "adapter": "Adapter of the model, in PEFT's format, to measure it with.",
    **dict.fromkeys(("revision", "base_dtype", "device", "dtype"), ""),
    "batch_size": "Rows to read, or prompts to answer, at a time. [default: 8]",
    "max_tokens": "Most new tokens of an answer, with --data. [default: 256]",
}
OF_ROWS = (  # options of llmq-train, with its help
    *("data_format", "map", "prompt_template", "preamble", "chat_template", "train_on", "overlong", "skip_bad_rows"),
)
OF_DATA, OF_TASKS = ("metrics", "answers", "max_tokens"), ("include_path", "fewshot", "apply_chat_template")
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
@click.option("--tasks", metavar="NAME,...", help="Tasks of lm-evaluation-harness: names, or YAML files.")
@click.option("--include-path", type=shell.Home(), metavar="DIR", help="Folder of YAML files of other --tasks.")
@click.option("--fewshot", type=click.IntRange(min=0), help="Examples before each question.  [default: the task's own]")
@click.option("--apply-chat-template", is_flag=True, help="Ask --tasks as chats.")
@click.option(
    "--seq-len", type=click.IntRange(min=2), help="Most tokens to read.  [default: 2048; of --tasks the model's most]"
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Take the first N rows, or questions of a task.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
def command(data: str | None, tasks: str | None, as_json: bool, **given: Any) -> None:
    """Measures a model: how well it predicts held-out data, how near its own answers come to those there, and what it
    reaches in tasks of lm-evaluation-harness."""
    if (data is None) == (tasks is None):
        raise UsageError(f"give --data or --tasks{', not both' if data else ''}")
    idle = OF_TASKS if data is not None else (*OF_DATA, *OF_ROWS)
    if wrong := [flag(key) for key in idle if given[key] not in (None, (), False) and key != "chat_template"]:
        raise UsageError(f"{', '.join(wrong)}: not with {'--data' if data is not None else '--tasks'}")
    own = {key: value for key in OF_MODEL if (value := given.pop(key)) not in (None, ())}
    options = section_of(GenerateOptions, own)
    found, table = _on_data(data, options, given) if data is not None else _on_tasks(str(tasks), options, given)
    click.echo(json.dumps(found) if as_json else table)


def _on_data(data: str, options: GenerateOptions, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What was measured on data, and its table."""
    # Imported here, so that --help does not wait for them.
    from llmq.evaluation.held_out import evaluated
    from llmq.screen import Screen

    typed = {key: value for key in OF_ROWS if (value := given[key]) not in (None, ())}
    rows = Options.parse({"model": options.model, "data": data, "seq_len": given["seq_len"] or 2048, **typed})
    screen, names = Screen(sys.stderr), with_commas(given["metrics"] or METRICS)
    about = (names, given["limit"], given["answers"])
    found = evaluated(data, options, rows, *about, say=screen.line, task=screen.task)
    return found, "\n".join(f"{name:<16}{_shown(value)}" for name, value in found.items())


def _on_tasks(tasks: str, options: GenerateOptions, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The results of tasks, and their table."""
    from llmq.evaluation.tasks import run_tasks, table_of
    from llmq.screen import Screen
    from llmq.training.records import to_json

    screen = Screen(sys.stderr)
    about = {key: given[key] for key in (*OF_TASKS, "seq_len", "limit", "chat_template")}
    found = run_tasks(with_commas(tasks), options, **about, say=screen.line, task=screen.task)
    kept = ("results", "groups", "n-shot", "n-samples", "versions", "higher_is_better")
    parts = {key.replace("-", "_"): found[key] for key in kept if key in found}
    of_model = {key: value for key in ("model", "adapter") if (value := getattr(options, key)) is not None}
    return {**of_model, **to_json(parts)}, table_of(found)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


command.params = [
    *(
        option_elsewhere(d, about=about) if (about := OF_MODEL[d.key]) else own_option(d)
        for d in describe("generate", GenerateOptions)
        if d.key in OF_MODEL
    ),
    *command.params,
    *(own_option(descriptions()[key]) for key in OF_ROWS),
]
if __name__ == "__main__":
    shell.main(command)
