"""What all commands share: help, versions, spellings, `~` in paths, and output that cannot be written."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest

from llmq.cli import (
    bench,
    doctor,
    estimate,
    export_wandb,
    generate,
    launch,
    merge,
    plot,
    report,
    shell,
    start,
    tokenize_data,
    train,
)
from llmq.cli import eval as evaluate
from llmq.data.tokens.token_file import TokenWriter
from llmq.options.commands import BenchOptions

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "train": train.command(),
    "launch": launch.command,
    "generate": generate.command,
    "bench": bench.command,
    "estimate": estimate.command,
    "merge": merge.command,
    "plot": plot.command,
    "report": report.command,
    "doctor": doctor.command,
    "evaluate": evaluate.command,
    "tokenize_data": tokenize_data.command,
    "export_wandb": export_wandb.command,
}
PATHS = {
    "plot": {"runs", "output"},
    "report": {"runs", "out", "bench"},
    "tokenize_data": {"inputs", "tokenizer", "out_dir"},
    "export_wandb": {"log_file"},
}


def process(*arguments, first="", **streams):
    """A Python process that finds modules in the folder `first` before all others."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, (first, ROOT))))}
    return subprocess.run([sys.executable, *arguments], env=environment, check=False, **streams)


def to_a_full_disk(*arguments):
    """A process whose stdout cannot be written."""
    with open("/dev/full", "w") as full:
        return process(*arguments, stdout=full)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_a_version_and_refuses_long_options_with_one_dash(name, capsys):
    for given, words in (("-h", "Usage: "), ("--help", "Usage: "), ("--version", "llmq ")):
        assert shell.run(COMMANDS[name], [given]) == 0
        assert capsys.readouterr().out.startswith(words)
    assert shell.run(COMMANDS[name], ["-version"]) == 2
    assert capsys.readouterr().err == "error: -version: options have two dashes: use --version\n"
    assert shell.run(COMMANDS[name], ["-hello=1"]) == 2
    assert "-hello=1: options have two dashes" in capsys.readouterr().err


def test_a_short_option_may_have_its_value_attached(capsys):
    assert shell.run(plot.command, ["-oout.png", "absent"]) == 3
    assert "absent" in capsys.readouterr().err
    assert shell.run(plot.command, ["absent", "-output=x.png"]) == 2
    assert "use --output" in capsys.readouterr().err


@pytest.mark.parametrize("name", PATHS)
def test_paths_may_begin_with_the_home_folder(name, monkeypatch):
    """Where the shell leaves it: `--out-dir=~/x`."""
    monkeypatch.setenv("HOME", "/home/ada")
    options = {p.name: p for p in COMMANDS[name].params if "FILE" in p.make_metavar(click.Context(COMMANDS[name]))}
    assert PATHS[name] | {"chat_template", "prompt_template", "add_tokens"} >= options.keys(), (
        "an option for a file that this test has not heard of"
    )
    for parameter in COMMANDS[name].params:
        if parameter.name in PATHS[name]:
            assert parameter.type.convert("~/x", parameter, None) == "/home/ada/x"
    described = BenchOptions(save="~/x", models=("~/z", "Qwen2.5-0.5B"))
    assert described.save == "/home/ada/x"
    assert described.models == ("/home/ada/z", "Qwen2.5-0.5B")


def test_output_that_cannot_be_written_is_one_message():
    for module in ("train", "bench", "plot"):
        done = to_a_full_disk("-m", f"llmq.cli.{module}", "--help")
        assert done.returncode == 7
        assert re.fullmatch(rb"error: cannot write: No space left on device: .*\n", done.stderr)


INTERRUPTED_IMPORT = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_while_a_command_is_imported_has_no_traceback(name, tmp_path):
    (tmp_path / "click.py").write_text(INTERRUPTED_IMPORT)
    done = process("-c", f"from llmq.cli.start import {name}; {name}()", "--help", first=tmp_path)
    assert done.returncode == -signal.SIGINT and done.stderr == b""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("start", ["-c from llmq.cli.start import train; train()", "-m llmq"])
def test_the_end_of_a_job_while_training_is_imported_asks_to_try_again(start, name, tmp_path):
    (tmp_path / "click.py").write_text(INTERRUPTED_IMPORT.replace("SIGINT", name))
    done = process(*start.split(" ", 1), "--help", first=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (75, b"", b"")


def test_an_interrupt_after_the_imports_is_one_message():
    """The command's own imports, which come late."""
    code = (
        "import os, signal, sys, click\n"
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "from llmq.cli import shell\n"
        "interrupted = click.Command('x', callback=lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "sys.exit(shell.run(interrupted, []))"
    )
    done = process("-c", code)
    assert (done.returncode, done.stderr) == (130, b"\nerror: interrupted\n")


def test_every_script_starts_that_way():
    scripts = re.findall(r'^[\w-]+ = "(llmq[\w.]+:\w+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert sorted(scripts) == sorted(f"llmq.cli.start:{name}" for name in COMMANDS)
    assert all(callable(getattr(start, name)) for name in COMMANDS)


def test_closed_streams_are_no_error():
    for arguments, code in (("--help >&-", 0), ("--help >&- 2>&-", 0), ("--hlep 2>&-", 2)):
        line = f"exec {sys.executable} -m llmq {arguments}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, cwd=ROOT, check=False)
        assert (done.returncode, done.stderr) == (code, b"")


@pytest.mark.slow
def test_a_dry_run_that_cannot_be_read_has_failed(tmp_path):
    with TokenWriter(tmp_path / "t.bin", vocab_size=97) as file:
        file.append(np.zeros(99, np.int32))
    sizes = ("--seq-len=16", "--batch-size=1", "--steps=1", "--device=cpu", "--dry-run")
    done = to_a_full_disk("-m", "llmq", "--model=tinyllama", "--from-scratch", f"--train-file={tmp_path}/t.bin", *sizes)
    assert done.returncode == 7 and done.stderr.startswith(b"error: cannot write: "), done.stderr
