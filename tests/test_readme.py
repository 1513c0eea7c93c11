"""The README agrees with the code: its tables are made from it (`python tests/test_readme.py`), its commands parse."""

import ast
import inspect
import re
import shlex
from importlib import import_module
from pathlib import Path

import click
import pytest

from llmq import errors
from llmq.cli import shell, train
from llmq.model.presets import PRESETS
from llmq.options.parse import SECTIONS, Options, descriptions
from llmq.options.section import flag
from llmq.quickstart.__main__ import NOT_PROVEN
from llmq.training.loop import TrainResult

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def options_table() -> str:
    """Every option by section: flag, values, default, meaning, other names."""
    lines = []
    for section, cls in SECTIONS.items():
        lines += [f"**{cls.title}**", "", "| option | default | meaning |", "|---|---|---|"]
        for d in descriptions().values():
            if d.section == section:
                value = "" if d.kind == "flag" else f" {d.metavar}"
                also = f" Also {', '.join(f'`{flag(alias)}`' for alias in d.aliases)}." if d.aliases else ""
                shown = ("on" if d.default else d.shown or "off") if d.kind == "flag" else d.shown or "none"
                cells = (f"`{flag(d.key)}{value}`", shown, d.help + also)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).strip()


def presets() -> str:
    """The presets' names."""
    return ", ".join(f"`{name}`" for name in PRESETS) + "."


MADE = {"options": options_table, "presets": presets}


def with_made_parts(text: str) -> str:
    """`text` with the parts between the marks made anew."""
    for name, make in MADE.items():
        parts = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text, count = parts.subn(lambda found, make=make: f"{found[1]}{make()}\n{found[2]}", text)
        assert count == 1, f"README.md has {count} places for the {name}"
    return text


def blocks(language: str) -> list[str]:
    """The code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


def commands() -> list[list[str]]:
    """Every line of a shell that the README shows in a block."""
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines]


def test_the_tables_are_those_of_the_code():
    text = README.read_text("utf-8")
    assert with_made_parts(text) == text, "run: python tests/test_readme.py"


def parse(name: str, arguments: list[str]) -> None:
    """Reads a command line as the command does, without doing it; click's errors if it cannot be read."""
    if name == "llmq-train":
        assert shell.run(train.command(), [*arguments, "--print-config"]) == 0, arguments
        return
    command = import_module(f"llmq.cli.{name.removeprefix('llmq-').replace('-', '_')}").command
    if isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        command, arguments = command.commands[arguments[0]], arguments[1:]  # a group reads only what comes before
    command.make_context(name, list(arguments))


def test_the_commands_exist_and_parse():
    seen = set()
    for name, *arguments in commands():
        seen.add(name)
        if name in ("llmq-train", "tokenize-data", "llmq-plot", "llmq-export-wandb", "llmq-bench"):
            parse(name, arguments)
        elif name == "bash":
            assert (ROOT / arguments[0]).is_file()
        else:
            assert name == "pip"
    assert {"llmq-train", "tokenize-data", "llmq-plot", "llmq-export-wandb", "llmq-bench", "bash"} <= seen


@pytest.mark.parametrize("line", ["llmq-bench op --lsit", "llmq-bench --lsit", "llmq-plot -x", "llmq-train --model"])
def test_a_command_that_does_not_parse_would_be_noticed(line):
    name, *arguments = line.split()
    with pytest.raises((AssertionError, click.ClickException)):
        parse(name, arguments)


def test_the_python_example_uses_options_and_results_that_exist():
    (example,) = map(ast.parse, blocks("python"))
    (call,) = [node for node in ast.walk(example) if isinstance(node, ast.Call) and node.keywords]
    assert ast.unparse(call.func) == "llmq.train"
    Options.parse({keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords})
    read = [node for node in ast.walk(example) if isinstance(node, ast.Attribute)]
    fields = {node.attr for node in read if ast.unparse(node.value) == "result"}
    assert fields and fields <= set(TrainResult.__dataclass_fields__)


def test_the_exit_codes_are_those_of_the_errors():
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", README.read_text("utf-8"), re.MULTILINE)}
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value is not errors.LlmqError]
    noes = {shell.BROKEN_PIPE, NOT_PROVEN, errors.LlmqError.exit_code}
    assert table == {0, errors.INTERRUPTED, errors.TERMINATED} | noes | {c.exit_code for c in classes}


def test_paths_of_the_checkout_exist():
    named = re.findall(r"\b(?:tools|tests|llmq)/[\w./-]+\.\w+", README.read_text("utf-8"))
    assert named and all((ROOT / name).exists() for name in named)


if __name__ == "__main__":
    README.write_text(with_made_parts(README.read_text("utf-8")), "utf-8")
