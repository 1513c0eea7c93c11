"""README and docs agree with the code: tables are made from it (`python tests/test_readme.py`), commands parse, links
lead somewhere, and every option and message that is named exists."""

import ast
import importlib.util
import inspect
import json
import re
import shlex
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from llmq import errors
from llmq.cli import shell, train
from llmq.generation.prompts import Answer
from llmq.generation.text import write
from llmq.model.presets import PRESETS
from llmq.options.commands import GenerateOptions
from llmq.options.field import INSTEAD, flag
from llmq.options.parse import SECTIONS, Options, descriptions

ROOT = Path(__file__).parents[1]
README, DOCS, SITE = ROOT / "README.md", ROOT / "docs", ROOT / "tools/docs/mkdocs.yml"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    *(ROOT / f"{name}/README.md" for name in ("cuda", "data")),
]
MOST_LINES = 170  # of the README
COMMANDS = (
    "llmq-train",
    "llmq-launch",
    "llmq-generate",
    "tokenize-data",
    "llmq-bench",
    "llmq-estimate",
    "llmq-merge",
    "llmq-eval",
    "llmq-plot",
    "llmq-report",
    "llmq-export-wandb",
    "llmq-doctor",
)
EXTRAS = re.findall(
    r"^(\w+) = \[",
    (ROOT / "pyproject.toml").read_text("utf-8").split("dependencies]")[1].split("[project.")[0],
    re.MULTILINE,
)
THROUGHPUT = json.loads((DOCS / "throughput.json").read_text("utf-8"))
BEST = (0, 1, 4, 7, 9)  # rows of THROUGHPUT in the README
# Flags of other programs, and of this checkout's scripts.
OTHER_FLAGS = {"--all", "--judges", "--emulate", "--sweeps", "--cpu", "--show-resume", "--fmad", "--tool", "--no-"}
OTHER_FLAGS |= {"--data", "--out", "--jobs", "--base", "--micro-batches", "--against"}  # of examples and comparisons
OTHER_FLAGS |= {flag(name) for name in INSTEAD} | {"--ntasks-per-node", "--nproc-per-node", "--rates"}


def options_table() -> str:
    """Every option by section: flag, values, default, meaning, other names."""
    lines = []
    for section, cls in SECTIONS.items():
        lines += [f"## {cls.title}", "", "| option | default | meaning |", "|---|---|---|"]
        for d in descriptions().values():
            if d.section == section:
                value = "" if d.kind == "flag" else f" {d.metavar}"
                also = f" Also {', '.join(f'`{flag(alias)}`' for alias in d.aliases)}." if d.aliases else ""
                shown = ("on" if d.default else d.shown or "off") if d.kind == "flag" else d.shown or "none"
                cells = (f"`{flag(d.key)}{value}`", shown, d.help + also)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    lines += ["## Names of other trainers", "", "| option | here |", "|---|---|"]
    others = {name: text.format(value="N") for name, text in INSTEAD.items()}
    lines += [f"| `{flag(name)}` | {text} |" for name, text in others.items()]
    return "\n".join(lines).strip()


def presets() -> str:
    """The presets' names."""
    return ", ".join(f"`{name}`" for name in PRESETS) + "."


def results_table() -> str:
    """Every result, and the numbered commands."""
    lines = ["| model | matmuls | head | tokens/s | SOL | memory | command | llm.q | PyTorch |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for row in THROUGHPUT["results"]:
        cells = [row["model"], row["matmuls"], row["head"], f"{row['tokens_per_s']:,}", f"{row['sol']}%"]
        cells += [f"{row['gib']} GiB", str(row["command"])]
        cells += [f"{row[name]:,}" if name in row else "" for name in ("llm.q", "PyTorch")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{n}. `{c}`" for n, c in enumerate(THROUGHPUT["commands"], 1))])


def best_table() -> str:
    """Five results with their commands."""
    lines = ["| model | matmuls | tokens/s | SOL | memory | command |", "|---|---|---|---|---|---|"]
    for row in (THROUGHPUT["results"][number] for number in BEST):
        cells = [row["model"], row["matmuls"], f"{row['tokens_per_s']:,}", f"{row['sol']}%", f"{row['gib']} GiB"]
        lines.append(f"| {' | '.join(cells)} | `{THROUGHPUT['commands'][row['command'] - 1]}` |")
    return "\n".join(lines)


MADE = {
    README: {"best": best_table, "presets": presets},
    DOCS / "options.md": {"options": options_table},
    DOCS / "results.md": {"results": results_table},
}


def with_made_parts(page: Path) -> str:
    """The text of a page with the parts between the marks made again."""
    text = page.read_text("utf-8")
    for name, make in MADE[page].items():
        parts = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text, count = parts.subn(lambda found, make=make: f"{found[1]}{make()}\n{found[2]}", text)
        assert count == 1, f"{page} has {count} places for the {name}"
    return text


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def inline(page: Path) -> list[str]:
    """What is between single backticks, outside of code blocks and of what the changelog says was removed."""
    return re.findall(
        r"`([^`]+)`", re.sub(r"```.*?```|### Removed.*?###", "", page.read_text("utf-8"), flags=re.DOTALL)
    )


def commands(page: Path) -> list[list[str]]:
    """Every line of a shell in a block, and our commands with options in a line of text."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    texts = [" ".join(text.split()) for text in inline(page)]
    shown = [text for text in texts if text.startswith(tuple(f"{name} -" for name in COMMANDS))]
    return [shlex.split(line) for line in (*lines, *shown)]


def links(page: Path) -> list[Path]:
    """The files of the checkout that a page links to, in order."""
    targets = re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", page.read_text("utf-8"))
    return [(page.parent / target).resolve() for target in targets if not target.startswith("https:")]


def slug(title: str) -> str:
    """The anchor that a heading gets on GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@cache
def flags() -> set[str]:
    """Every option of every command, in each spelling."""
    modules = [import_module(f"llmq.cli.{n.removeprefix('llmq-').replace('-', '_')}") for n in COMMANDS[1:]]
    parsers = [train.command(), *(module.command for module in modules)]
    parsers += [sub for parser in parsers for sub in getattr(parser, "commands", {}).values()]
    options = [p for parser in parsers for p in parser.params if isinstance(p, click.Option)]
    return {name for option in options for name in (*option.opts, *option.secondary_opts)} | {"--help"}


@cache
def messages() -> str:
    """Every text in the code, a line each."""
    nodes = [node for path in (ROOT / "llmq").rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


@pytest.mark.parametrize("page", MADE, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_code(page):
    assert with_made_parts(page) == page.read_text("utf-8"), "run: python tests/test_readme.py"


def test_the_readme_is_short():
    assert len(README.read_text("utf-8").splitlines()) <= MOST_LINES


def test_badges_and_citation_are_those_of_the_package():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    python = project["requires-python"].removeprefix(">=")
    badges = re.findall(r"!\[(.*?)\]\(https://img", README.read_text("utf-8"))
    assert badges == [f"License: {project['license']}", f"Python {python}+"]
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"version: {project['version']}\n" in citation and f"license: {project['license']}\n" in citation


def test_the_picture_is_drawn_from_the_data(tmp_path):
    """Its words and numbers, whatever the version of matplotlib."""
    spec = importlib.util.spec_from_file_location("draw_throughput", ROOT / "tools/draw_throughput.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.draw(THROUGHPUT["results"], tmp_path / "again.svg")
    committed, again = (
        [node.text for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
        for path in (DOCS / "throughput.svg", tmp_path / "again.svg")
    )
    assert committed == again and "169,381" in committed, "run: python tools/draw_throughput.py"


def parse(name: str, arguments: list[str]) -> None:
    """Reads a command line as the command does, without doing it; click's errors if it cannot be read."""
    if name == "llmq-train":
        assert shell.run(train.command(), [*arguments, "--print-config"]) == 0, arguments
        return
    command = import_module(f"llmq.cli.{name.removeprefix('llmq-').replace('-', '_')}").command
    if isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        command, arguments = command.commands[arguments[0]], arguments[1:]  # a group reads only what comes before
    command.make_context(name, list(arguments))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_exist_and_parse(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, *arguments in commands(page):
        if name in COMMANDS:
            if not {"--help", "--version"} & set(arguments):
                parse(name, arguments)
        elif name in ("bash", "python"):
            assert (ROOT / arguments[0]).is_file()
        else:
            extras = re.findall(r"\[(.*?)\]", arguments[-1])
            assert name == "pip" and set(",".join(extras).split(",")) <= {"", *EXTRAS}


def test_every_command_is_shown():
    shown = {name for page in (README, *DOCS.glob("*.md")) for name, *_ in commands(page)}
    assert {*COMMANDS, "bash", "pip"} <= shown


@pytest.mark.parametrize("line", ["llmq-bench op --lsit", "llmq-bench --lsit", "llmq-plot -x", "llmq-train --model"])
def test_a_command_that_does_not_parse_would_be_noticed(line):
    name, *arguments = line.split()
    with pytest.raises((AssertionError, click.ClickException)):
        parse(name, arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_that_are_named_exist(page):
    named = {name for text in inline(page) for name in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
    assert not named - flags() - OTHER_FLAGS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            titles = re.findall(r"^#+ (.*)$", there.read_text("utf-8"), re.MULTILINE) if there.is_file() else []
            if not there.exists() or (anchor and anchor not in map(slug, titles)):
                wrong.append(target)
    assert not wrong


def test_the_contents_are_the_pages_of_the_site_in_order():
    contents = DOCS / "README.md"
    nav = [ROOT / name for name in re.findall(r"- (\S+\.md)$", SITE.read_text("utf-8"), re.MULTILINE)]
    assert set(nav) == set(PAGES) and nav == [*dict.fromkeys((README, contents, *links(contents)))]
    assert {*DOCS.glob("*.md")} <= {*links(README)}


def test_each_page_leads_to_the_next_one_and_to_the_contents():
    contents = DOCS / "README.md"
    pages = [path for path in links(contents) if DOCS in path.parents]
    for page, following in pairwise(pages):
        assert links(page)[-2:] == [following, contents], page
    assert links(pages[-1])[-1] == contents


def test_the_symptoms_are_messages_of_the_code():
    rows = re.findall(r"^\| (.*?) \|", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)
    quoted = [part.strip(" .") for row in rows for text in re.findall(r"`(.*?)`", row) for part in text.split("...")]
    assert len(quoted) > 40 and not [part for part in quoted if part not in messages()]


def test_the_python_examples_use_options_and_results_that_exist():
    (example,), (generation,) = (map(ast.parse, blocks(page, "python")) for page in (README, DOCS / "generate.md"))
    nodes = [*ast.walk(example), *ast.walk(generation)]
    calls = [(ast.unparse(node.func), node.keywords) for node in nodes if isinstance(node, ast.Call)]
    (training,) = [keywords for name, keywords in calls if name == "llmq.train"]
    Options.parse({keyword.arg: ast.literal_eval(keyword.value) for keyword in training})
    given = {keyword.arg for name, keywords in calls if name == "llmq.generate" for keyword in keywords}
    known = {*inspect.signature(write).parameters, *GenerateOptions.model_fields}
    assert given and given <= known
    named = {"answer", "piece"}
    read = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in named]
    assert read and {node.attr for node in read} <= set(Answer.__dataclass_fields__)


def test_the_exit_codes_are_those_of_the_errors():
    text = (DOCS / "troubleshooting.md").read_text("utf-8")
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    codes = {kind.exit_code for kind in vars(errors).values() if inspect.isclass(kind) and hasattr(kind, "exit_code")}
    assert table == {0, errors.INTERRUPTED, errors.TERMINATED, shell.BROKEN_PIPE} | codes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_of_the_checkout_exist(page):
    named = re.findall(r"\b(?:tools|tests|llmq|examples|docs)/[\w./-]+\.\w+", page.read_text("utf-8"))
    assert not [name for name in named if not (ROOT / name).exists()]


if __name__ == "__main__":
    for made in MADE:
        made.write_text(with_made_parts(made), "utf-8")
