"""The way of someone new: the README's commands, and those that a run prints, are run unchanged."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import chat_model, folder, with_commands, write_weights

from llmq.report.read import read_log

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def command(start):
    """The one command of the README on a folder of the user's that starts so."""
    (found,) = re.findall(rf"^{start} .*--model=my-model .*$", README.replace("\\\n", " "), re.MULTILINE)
    return found


@pytest.fixture
def shell(tmp_path):
    """A folder with a model and chats, as the README calls them; starts a line in it, as a terminal does."""
    files = chat_model(tmp_path / "tokenizer")
    write_weights(
        folder(tmp_path / "source", vocab_size=420, max_position=1024), tmp_path / "my-model", tokenizer=files
    )
    asked = [({"role": "user", "content": f"What is {n} and 1?"}, n + 1) for n in range(1000)]
    rows = [{"messages": [user, {"role": "assistant", "content": f"It is {n}."}]} for user, n in asked]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environ = {**with_commands(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return lambda line: subprocess.Popen(["bash", "-c", line], cwd=tmp_path, env=environ, **options)


def finished(process):
    """All that a line printed, which has to succeed."""
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return said


@pytest.mark.slow
def test_an_adapter_of_a_folder_is_trained_resumed_on_two_ranks_and_asked(shell, tmp_path):
    finished(shell(command("llmq-train")))
    first = read_log(tmp_path / "runs/lora").train["step"].size

    cut = shell(command("llmq-launch"))
    said = ""
    while "[T] step" not in said:
        line = cut.stdout.readline()
        assert line, said
        said += line
    os.killpg(cut.pid, signal.SIGINT)
    said += cut.communicate(timeout=60)[0]
    assert cut.returncode == 130 and "Ranks: 2" in said, said
    resumed = finished(shell(re.search(r"Resume with:\n(.*)", said)[1]))
    assert "Ranks: 2" in resumed and "Continued from runs/lora/checkpoints/" in resumed
    steps = read_log(tmp_path / "runs/lora").train["step"].tolist()
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 2 * first

    (ask,) = re.findall(r"`(llmq\.generate\(.*?\))`", README, re.DOTALL)
    (tmp_path / "ask.py").write_text(f"import llmq\nprint({ask}[0].text)\n")
    answer = finished(shell(f"{sys.executable} ask.py"))
    assert answer.strip() and finished(shell(f"{command('llmq-generate')} 2>/dev/null")) == answer
