"""llmq-generate: text after prompts, and chats, by a model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from llmq.cli import shell
from llmq.errors import UsageError

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@shell.version_option
@click.command(
    "llmq-generate",
    context_settings=shell.SETTINGS,
    epilog="Example: llmq-generate --model=Qwen/Qwen2.5-0.5B --prompt='The capital of France is'",
)
@click.option(
    "--model",
    required=True,
    type=shell.Home(),
    metavar="FOLDER-OR-NAME",
    help="A folder, a hub name, or with --from-scratch a preset such as Qwen2.5-0.5B.",
)
@click.option(
    "--adapter", type=shell.Home(), metavar="DIR", help="An adapter of the model, in PEFT's format, to write with."
)
@click.option(
    "--base-dtype",
    type=shell.BASE_DTYPE,
    help="Dtype in which to hold the layers' weights, as in training.  [default: that of the adapter's base]",
)
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option("--from-scratch", is_flag=True, help="Use random weights, drawn from --seed.")
@click.option(
    "--tokenizer", type=shell.Home(), metavar="FOLDER-OR-NAME", help="Whose tokenizer.  [default: the model's]"
)
@click.option(
    "--prompt",
    multiple=True,
    metavar="TEXT",
    help="Text to continue; its continuation is printed as it comes. Repeat it for more texts, answered together.",
)
@click.option(
    "--prompts",
    type=shell.Home(),
    metavar="FILE",
    help="Lines of text, or JSON lines with a prompt, messages or tokens; the answers are JSON lines.",
)
@click.option("--chat", is_flag=True, help="Chat by the model's template: a line of input is a turn, its end ends it.")
@click.option("--system", metavar="TEXT", help="The system message of --chat.")
@click.option(
    "--chat-template",
    type=shell.FileOrText(),
    metavar="FILE-OR-TEXT",
    help="Chat template in Jinja.  [default: the tokenizer's own]",
)
@click.option(
    "--out", type=shell.Home(), metavar="FILE", help="Write the JSON lines of the answers here.  [default: stdout]"
)
@click.option(
    "--json",
    is_flag=True,
    help="Print a JSON line for each answer, as for --prompts, with the log p of each new token.",
)
@click.option(
    "--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Most new tokens of an answer."
)
@click.option(
    "--max-length",
    type=click.IntRange(2),
    default=4096,
    show_default=True,
    help="Most tokens of a chat, all its turns.",
)
@click.option(
    "--stop",
    multiple=True,
    metavar="TEXT",
    help="End an answer before this text, which may begin or end within a token. Repeat it for more texts.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Answers to each prompt, drawn independently at a --temperature above 0.",
)
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Prompts to answer at a time.")
@click.option(
    "--temperature",
    type=shell.Number(0),
    default=0.0,
    show_default=True,
    help="Divide the logits by this before a token is drawn; 0 takes the most likely one.",
)
@click.option(
    "--top-k", type=click.IntRange(0), default=0, show_default=True, help="Draw from the N most likely; 0: all."
)
@click.option(
    "--top-p",
    type=shell.Number(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Draw from the fewest most likely tokens whose probabilities reach this; 1: all.",
)
@click.option(
    "--min-p",
    type=shell.Number(0, 1),
    default=0.0,
    show_default=True,
    help="Draw from tokens at least this times as likely as the most likely one; 0: all.",
)
@click.option(
    "--repetition-penalty",
    type=shell.Number(0, min_open=True),
    default=1.0,
    show_default=True,
    help="Divide the positive logits of tokens that are there already by this, and multiply the others; 1: off.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of what is drawn.")
@click.option("--ignore-end", is_flag=True, help="Go on after the model's end tokens, to --max-tokens.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp32"]),
    help="Of weights, cache and activations.  [default: bf16 on a GPU, fp32 on the CPU]",
)
@click.option("--stats", is_flag=True, help="Print a line on speed at the end, to stderr.")
def command(prompt: tuple[str, ...], prompts: str | None, chat: bool, **options: Any) -> None:
    """Writes what a model says after a prompt, after each of many, or in a chat."""
    given = [name for name, value in (("--prompt", prompt), ("--prompts", prompts), ("--chat", chat)) if value]
    if len(given) != 1:
        raise UsageError(f"give one of --prompt, --prompts and --chat, not {' and '.join(given) or 'none'}")
    _refuse_idle(given[0], options)
    # Imported here, so that --help does not wait for them.
    from llmq.generation import console
    from llmq.generation.prompts import questions_of, read_questions
    from llmq.generation.text import Sampling, Settings, Writer

    system, out, as_json, stats = (options.pop(name) for name in ("system", "out", "json", "stats"))
    sampling = Sampling(**{name: options.pop(name) for name in SAMPLING}, logprobs=as_json)
    questions = read_questions(Path(prompts)) if prompts else questions_of(prompt)
    reads_text = chat or any(question.tokens is None for question in questions)
    writer = Writer(Settings(sampling=sampling, **options), reads_text=reads_text)
    for note in writer.notes:
        click.echo(note, err=True)
    if chat:
        console.chat(writer, system)
    elif prompts or as_json:
        console.answer_all(writer, questions, out)
    else:
        console.continue_prompts(writer, questions)
    if stats:
        click.echo(writer.course.line(writer.weight_bytes), err=True)


def _refuse_idle(given: str, options: dict[str, Any]) -> None:
    """UsageError for an option that changes nothing in this way of asking."""
    if options["system"] is not None and given != "--chat":
        raise UsageError(f"--system goes with --chat, not with {given}")
    used = {"--out": options["out"] is not None, "--json": options["json"], "--samples": options["samples"] > 1}
    if given == "--chat" and (names := [name for name, is_used in used.items() if is_used]):
        raise UsageError(f"{', '.join(names)}: not with --chat: give the messages of chats in a file of --prompts")
    if options["out"] is not None and given == "--prompt" and not options["json"]:
        raise UsageError("--out takes JSON lines: give --json with it, or a file of --prompts")


main = shell.console_script(command)

if __name__ == "__main__":
    main()
