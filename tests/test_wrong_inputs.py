"""Wrong inputs of all commands and of Python: each is one error with the words that help, and never a traceback."""

import importlib
import io
import shlex

import pytest
from huggingface_hub import constants
from wrong_inputs.place import write_all
from wrong_inputs.table import ASKED, BASE, COMMAND_LINES, GENERATE, OPTIONS, TRAIN

import llmq
from llmq.cli import shell
from llmq.errors import LlmqError

MODULES = {"tokenize-data": "tokenize_data", "llmq-export-wandb": "export_wandb", "llmq-bench op": "bench"}
REPLACES = {"--data": "--train-file", "--prompts": "--prompt", "--chat": "--prompt"}
ROWS = [
    pytest.param(name, code, *line.rsplit(" | ", 1), id=f"{name} {line.rsplit(' | ', 1)[0]}")
    for (name, code), lines in COMMAND_LINES.items()
    for line in lines.strip().splitlines()
]
LEFT = "a wrong input leaves no file behind"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The folder of inputs, in which nothing is written."""
    folder = tmp_path_factory.mktemp("inputs")
    write_all(folder)
    return folder


@pytest.fixture
def place(files, tmp_path, monkeypatch):
    """The same as the current folder, without a network, and with a cache elsewhere."""
    monkeypatch.chdir(files)
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = {path for path in files.rglob("*") if not path.is_dir()}
    yield
    assert {path for path in files.rglob("*") if not path.is_dir()} == before, LEFT


def with_base(name, given):
    """The arguments with those of `BASE` that they do not have themselves."""
    base, given = shlex.split(BASE[name]), shlex.split(given)
    flags = {one.partition("=")[0] for one in given}
    flags |= {other for one, other in REPLACES.items() if one in flags}
    command, pairs = base[: len(base) % 2], base[len(base) % 2 :]
    kept = [one for pair in zip(pairs[::2], pairs[1::2], strict=True) if pair[0] not in flags for one in pair]
    return [*command, *kept, *given]


def sampled(rows, ids):
    """Every third row, and the others as slow tests."""
    marks = [() if number % 3 == 0 else pytest.mark.slow for number in range(len(rows))]
    return [pytest.param(*row, id=one, marks=mark) for row, one, mark in zip(rows, ids, marks, strict=True)]


@pytest.mark.parametrize(
    ("name", "code", "given", "says"), sampled([row.values for row in ROWS], [row.id for row in ROWS])
)
def test_a_command_says_what_is_wrong(name, code, given, says, place, capsys):
    module = importlib.import_module(f"llmq.cli.{MODULES.get(name, name.removeprefix('llmq-'))}")
    command = module.command() if name == "llmq-train" else module.command
    assert shell.run(command, with_base(name, given)) == code
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said
    assert sum(line.startswith("error: ") for line in said.splitlines()) == 1


@pytest.mark.parametrize(("given", "says"), sampled(TRAIN, map(str, range(len(TRAIN)))))
def test_train_says_what_is_wrong(given, says, place):
    with pytest.raises(LlmqError) as error:
        llmq.train(**{"console": io.StringIO(), **OPTIONS, **given})
    assert says in str(error.value)


@pytest.mark.parametrize(("given", "says"), sampled(GENERATE, map(str, range(len(GENERATE)))))
def test_generate_says_what_is_wrong(given, says, place):
    with pytest.raises(LlmqError) as error:
        llmq.generate(**{**ASKED, **given})
    assert says in str(error.value)


def test_the_table_has_every_command_and_each_row_once():
    rows = [(name, given) for name, _, given, _ in (row.values for row in ROWS)]
    assert len(rows) == len(set(rows)) and len(rows) + len(TRAIN) + len(GENERATE) >= 380
    assert {name for name, _ in rows} == set(BASE)
    assert all(says for _, _, _, says in (row.values for row in ROWS))
