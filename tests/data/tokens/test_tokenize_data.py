"""The command: its exit codes and messages, and what it leaves after a signal."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from small_tokenizers import EOS

from llmq.cli import shell
from llmq.cli.tokenize_data import command
from llmq.data.tokens.token_file import TokenFile

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools/tokenize_data.py"
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The command in this process: its exit code, and what it says on both streams."""

    def call(*arguments: object) -> tuple[int, str]:
        code = shell.run(command, [str(argument) for argument in arguments])
        return code, "".join(capsys.readouterr())

    before = signal.getsignal(signal.SIGTERM)
    yield call
    assert signal.getsignal(signal.SIGTERM) is before


def test_model_and_tokenizer_are_one_option_and_the_fraction_counts(
    run: Run, tmp_path: Path, small_tokenizer: Path
) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("a line\n" * 100)
    arguments = ("--input", tmp_path / "0.txt", "--input", tmp_path / "[123].txt", "--model", small_tokenizer)
    code, output = run(*arguments, "--eval-fraction", 0.5, "--out-dir", tmp_path / "out")
    train = TokenFile.open(tmp_path / "out/train.bin")
    assert code == 0 and output.count("in 2 documents") == 2
    assert f"train.bin: {train.num_tokens} tokens in 2 documents\n" in output


def test_rows_are_shown_and_bad_ones_left_out(run: Run, tmp_path: Path, small_tokenizer: Path) -> None:
    rows = [{"frage": f"What is {n}?", "answer": "10 ships"} for n in range(30)]
    lines = [json.dumps(row) for row in rows]
    lines[3] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    arguments = ("--input", tmp_path / "a.jsonl", "--model", small_tokenizer, "--out-dir", tmp_path / "out")
    arguments = (*arguments, "--map", "question=frage")
    code, output = run(*arguments)
    assert code == 3 and f"{tmp_path / 'a.jsonl'}:4: not JSON" in output and "--skip-bad-rows N" in output
    code, output = run(*arguments, "--skip-bad-rows", 1, "--show", 1)
    assert (
        code == 0 and "a.jsonl:1: " in output and "a.jsonl:2: " not in output and "1 bad rows were left out" in output
    )
    assert f"0?[[10 ships{EOS}]]" in output  # no terminal, so no colors
    assert "question = frage" in output and "27 documents" not in output and "in 26 documents" in output


def test_prompts_are_written_as_asked(run: Run, tmp_path: Path, small_tokenizer: Path) -> None:
    row = json.dumps({"instruction": "say", "output": "10 ships"})
    (tmp_path / "a.jsonl").write_text(f"{row}\n" * 30)
    (tmp_path / "p.jinja").write_text("Q: {{ instruction }}\n")
    arguments = ("--input", tmp_path / "a.jsonl", "--model", small_tokenizer, "--show", 1)
    for number, (more, begin) in enumerate(
        [((), "Below"), (("--no-preamble",), "###"), (("--prompt-template", tmp_path / "p.jinja"), "Q:")]
    ):
        code, output = run(*arguments, *more, "--out-dir", tmp_path / str(number))
        shown = output.split("a.jsonl:1: ")[1].split("\n")[1]
        assert code == 0 and shown.startswith(begin)


def test_as_many_rows_are_shown_as_asked(run: Run, tmp_path: Path, small_tokenizer: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = ["{" if n == 7 else json.dumps({"text": f"row {n}"}) for n in range(100)]
    path.write_text("\n".join(rows))
    arguments = ("--input", path, "--model", small_tokenizer, "--skip-bad-rows", 1)
    code, output = run(*arguments, "--out-dir", tmp_path / "some", "--show", 70)
    shown = re.findall(r"a\.jsonl:(\d+): \d+ tokens", output)
    # Each tenth row is for evaluation, and row 8 is broken.
    assert code == 0 and shown == [str(n) for n in range(1, 101) if n % 10 and n != 8][:70]
    code, output = run(*arguments, "--out-dir", tmp_path / "all", "--show", 1000)
    assert code == 0 and len(re.findall(r"a\.jsonl:(\d+): \d+ tokens", output)) == 89


def test_help_is_quick_because_nothing_heavy_is_imported(run: Run) -> None:
    program = (
        "import sys; from llmq.cli.tokenize_data import command; "
        "print([m for m in ('numpy', 'tokenizers', 'rich', 'pyarrow', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
    code, output = run("--help")
    assert code == 0 and "tokenize-data --dataset tiny-shakespeare --model qwen" in output


@pytest.mark.slow
def test_the_script_works_from_anywhere_in_a_c_locale(tmp_path: Path, small_tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("\u00e9t\u00e9\n" * 50, encoding="utf-8")
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    command = [sys.executable, str(TOOL), "--input", "a.txt", "--tokenizer", str(small_tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "data/a-small/eval.bin.json").is_file() and "data/a-small/train.bin" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 75)]
)
def test_a_signal_leaves_no_half_file(tmp_path: Path, small_tokenizer: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "a.txt").write_text("It's the king's 10 ships, isn't it?\n" * 1_000_000)
    out = tmp_path / "out"
    command = [sys.executable, str(TOOL), "--input", "a.txt", "--tokenizer", str(small_tokenizer), "--out-dir", "out"]
    # a background job of a shell ignores Ctrl-C, and so would what it starts
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        deadline = time.monotonic() + 300
        while not list(out.glob(".partial/.train*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == code and "Traceback" not in errors
    assert list(out.iterdir()) == []
