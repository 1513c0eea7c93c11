"""The run that most tests of training begin with."""

import pytest
from tiny_runs import tiny_options

from llmq.cli import estimate, shell


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options of a small run in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tiny_options(tmp_path)


@pytest.fixture
def estimated(capsys):
    """Runs `llmq-estimate`: its exit code, and what it prints."""
    return lambda *arguments: (shell.run(estimate.command, arguments), capsys.readouterr())
