"""The run that most tests of training begin with."""

import pytest
from tiny_runs import on_weights, tiny_options

from llmq.cli import estimate, shell


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options of a small run in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tiny_options(tmp_path)


@pytest.fixture
def based(tmp_path, monkeypatch):
    """Options of a small run on a model with weights, which is in `base`."""
    monkeypatch.chdir(tmp_path)
    return {**on_weights(tmp_path, times=5), "steps": 6, "warmup": 0}


@pytest.fixture
def estimated(capsys):
    """Runs `llmq-estimate`: its exit code, and what it prints."""
    return lambda *arguments: (shell.run(estimate.command, arguments), capsys.readouterr())
