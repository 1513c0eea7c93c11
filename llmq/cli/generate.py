"""llmq-generate: text after prompts, and chats, by a model's weights."""

from pathlib import Path
from typing import Any

import click

from llmq.cli import shell
from llmq.cli.train import own_option
from llmq.errors import UsageError
from llmq.options.commands import GenerateOptions
from llmq.options.field import describe, section_of


@shell.version_option
@click.command(
    "llmq-generate",
    context_settings=shell.SETTINGS,
    epilog="Example: llmq-generate --model=Qwen/Qwen2.5-0.5B --prompt='The capital of France is'",
)
@click.option("--prompt", multiple=True, metavar="TEXT", help="Text to continue, printed as it comes; repeatable.")
@click.option(
    "--prompts", type=shell.Home(), metavar="FILE", help="Lines of text, or JSON lines of prompts, messages or tokens."
)
@click.option("--chat", is_flag=True, help="Chat by the model's template: a line of input is a turn, its end ends it.")
@click.option("--system", metavar="TEXT", help="The system message of --chat.")
@click.option("--out", type=shell.Home(), metavar="FILE", help="Write JSON lines of answers here.  [default: stdout]")
@click.option("--json", "as_json", is_flag=True, help="Print answers as JSON lines, with the log p of each new token.")
@click.option("--stats", is_flag=True, help="Print a line on speed at the end, to stderr.")
def command(prompt: tuple[str, ...], prompts: str | None, chat: bool, out: str | None, **given: Any) -> None:
    """Writes what a model says after a prompt, after each of many, or in a chat."""
    ways = [name for name, value in (("--prompt", prompt), ("--prompts", prompts), ("--chat", chat)) if value]
    if len(ways) != 1:
        raise UsageError(f"give one of --prompt, --prompts and --chat, not {' and '.join(ways) or 'none'}")
    system, as_json, stats = (given.pop(name) for name in ("system", "as_json", "stats"))
    options = section_of(GenerateOptions, {key: value for key, value in given.items() if value not in (None, ())})
    _refuse_idle(ways[0], system, out, as_json=as_json, samples=options.samples)
    # Imported here, so that --help does not wait for them.
    from llmq.generation import text
    from llmq.generation.prompts import questions_of, read_questions

    questions = read_questions(Path(prompts)) if prompts else questions_of(prompt)
    reads_text = chat or any(question.tokens is None for question in questions)
    writer = text.Writer(options, logprobs=as_json, reads_text=reads_text)
    for note in writer.notes:
        click.echo(note, err=True)
    if chat:
        text.chat(writer, system)
    elif prompts or as_json:
        text.answer_all(writer, questions, out)
    else:
        text.continue_prompts(writer, questions)
    if stats:
        click.echo(writer.course.line(writer.weight_bytes), err=True)


def _refuse_idle(given: str, system: str | None, out: str | None, *, as_json: bool, samples: int) -> None:
    """UsageError for an option that changes nothing in this way of asking."""
    if system is not None and given != "--chat":
        raise UsageError(f"--system goes with --chat, not with {given}")
    used = {"--out": out is not None, "--json": as_json, "--samples": samples > 1}
    if given == "--chat" and (names := [name for name, is_used in used.items() if is_used]):
        raise UsageError(f"{', '.join(names)}: not with --chat: give the messages of chats in a file of --prompts")
    if out is not None and given == "--prompt" and not as_json:
        raise UsageError("--out takes JSON lines: give --json with it, or a file of --prompts")


command.params = [*map(own_option, describe("generate", GenerateOptions)), *command.params]
if __name__ == "__main__":
    shell.main(command)
