"""tokenize-data: the ids of the library on the whole text, files, sidecars; exit codes, messages, signals."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sample_files import verified
from small_tokenizers import EOS
from tokenizers import Tokenizer

from llmq.cli import shell
from llmq.cli.tokenize_data import command
from llmq.data.batches.loader import open_data
from llmq.data.tokens import text as text_files
from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenize import tokenize_data
from llmq.data.tokens.tokenizer import Sidecar
from llmq.errors import UsageError
from llmq.options.data import DataOptions

TOOL = Path(__file__).parents[3] / "tools/tokenize_data.py"


def reference(folder: Path, documents: list[str], eos: int) -> list[int]:
    """The library's own ids, one whole document at a time."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return [i for document in documents for i in (*tokenizer.encode(document, add_special_tokens=False).ids, eos)]


def test_two_files_two_sidecars_and_the_tokenizer(tmp_path: Path, small_tokenizer: Path, call) -> None:
    texts, seen, out = [f"document {number:02d}\n" for number in range(20)], [], tmp_path / "out"
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02d}.txt").write_text(text)
    call(tmp_path / "*.txt", on_progress=lambda done, total: seen.append((done, total)))
    assert sorted(p.name for p in out.iterdir()) == [
        "eval.bin", "eval.bin.json", "tokenizer", "train.bin", "train.bin.json",
    ]  # fmt: skip
    assert TokenFile.open(out / "eval.bin").tokens.tolist() == reference(small_tokenizer, [texts[9], texts[19]], 0)
    train = TokenFile.open(out / "train.bin")
    assert train.tokens.tolist() == reference(small_tokenizer, texts[:9] + texts[10:19], 0)
    sidecar = Sidecar.read(out / "train.bin", train.num_tokens)
    assert sidecar is not None and sidecar.num_documents == 18 and sidecar.text == (str(tmp_path / "*.txt"),)
    assert sidecar.tokenizer.source == str(small_tokenizer) and sidecar.tokenizer.vocab_size == train.header.vocab_size
    assert "ends with <|endoftext|>" in sidecar.document_rule and "whole documents" in sidecar.document_rule
    assert seen[-1] == (20 * 12, 20 * 12)
    assert (out / "tokenizer/tokenizer.json").read_bytes() == (small_tokenizer / "tokenizer.json").read_bytes()
    files = {"train_file": str(out / "train.bin"), "eval_file": str(out / "eval.bin")}
    options = DataOptions(**files, batch_size=1, seq_len=4, grad_accumulation=1)
    assert open_data(options, train.header.vocab_size, 0).tokenizer_folder() == out / "tokenizer"  # type: ignore[arg-type]


def test_default_folders_are_named_after_text_and_tokenizer(tmp_path: Path, monkeypatch, small_tokenizer: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    for name in ("one.txt", "two.txt"):
        (tmp_path / "books" / name).write_text("a line\n" * 30)
    monkeypatch.setattr("llmq.data.rows.find_sources.tiny_shakespeare", lambda: Path("books/one.txt"))
    for arguments, folder in [
        ({"inputs": ["books/one.txt"]}, "data/one-small"),
        ({"inputs": ["books/*.txt"]}, "data/books-small"),
        ({"dataset": "tiny-shakespeare"}, "data/tiny-shakespeare-small"),
    ]:
        written = tokenize_data(tokenizer=str(small_tokenizer), **arguments)  # type: ignore[arg-type]
        assert [str(file.path) for file in written] == [f"{folder}/train.bin", f"{folder}/eval.bin"]
    with pytest.raises(UsageError, match=r"whose tokenizer makes the tokens\? Give --model"):
        tokenize_data(inputs=["books/one.txt"])


@pytest.mark.slow
def test_real_text_with_a_real_tokenizer(tmp_path: Path, monkeypatch, shared: Callable[[str], Path]) -> None:
    """Also where it is cut into small pieces."""
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 512)
    corpus, folder = shared("tinyshakespeare.txt"), shared("qwen2.5-tokenizer")
    written = tokenize_data(tokenizer=str(folder), inputs=[str(corpus)], out_dir=tmp_path)
    assert [file.num_tokens for file in written] == [270362, 31470]
    train, evaluation = (verified(file.path, 151936).tokens for file in written)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = json.loads((tmp_path / "eval.bin.json").read_text())["tokenizer"]["eos_token_id"]
    assert train[-1] == evaluation[-1] == eos == tokenizer.token_to_id("<|endoftext|>")
    parts = [tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False) for part in (train, evaluation)]
    whole = corpus.read_bytes().decode()
    assert "".join(parts) == whole
    assert 0.09 * len(whole) < len(parts[1]) <= 0.1 * len(whole) and parts[0].endswith("\n")
    np.testing.assert_array_equal(evaluation[:-1], tokenizer.encode(parts[1], add_special_tokens=False).ids)


@pytest.mark.slow
def test_real_questions_and_answers_train_exactly_the_answers_and_their_ends(
    tmp_path: Path, shared: Callable[[str], Path]
) -> None:
    rows, folder = shared("gsm8k-test.jsonl"), shared("qwen2.5-tokenizer")
    (written,) = tokenize_data(tokenizer=str(folder), inputs=[str(rows)], eval_fraction=0, out_dir=tmp_path)
    file = verified(written.path, 151936)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    answers = [json.loads(line)["answer"] for line in rows.read_text().splitlines()]
    codes = tokenizer.encode_batch(answers, add_special_tokens=False)
    ends = [[*code.ids, tokenizer.token_to_id("<|endoftext|>")] for code in codes]
    trained = file.trained(0, file.num_tokens)
    assert file.num_documents == len(answers) == 1319 and trained.sum() == sum(map(len, ends))
    np.testing.assert_array_equal(file.tokens[trained], np.concatenate(ends))
    starts = file.document_starts
    for number, end in enumerate(ends):
        assert trained[starts[number] : starts[number + 1]].sum() == len(end)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, small_tokenizer: Path) -> Callable[..., tuple[int, str]]:
    """The command in this process, with the small tokenizer: its exit code, and what it says on both streams."""

    def call(*arguments: object) -> tuple[int, str]:
        given = ("--model", small_tokenizer, "--out-dir", tmp_path / "out", *arguments)
        before = signal.getsignal(signal.SIGTERM)
        code = shell.run(command, [str(argument) for argument in given])
        assert signal.getsignal(signal.SIGTERM) is before
        return code, "".join(capsys.readouterr())

    return call


def test_texts_are_named_in_any_way_and_the_fraction_counts(run, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("a line\n" * 100)
    code, output = run("--input", tmp_path / "0.txt", "--input", tmp_path / "[123].txt", "--eval-fraction", 0.5)
    train = TokenFile.open(tmp_path / "out/train.bin")
    assert code == 0 and output.count("in 2 documents") == 2
    assert f"train.bin: {train.num_tokens} tokens in 2 documents\n" in output
    code, output = run("--input", tmp_path / "0.txt", "--show", 1)
    assert code == 2 and "--show is for data in rows, but" in output


def test_as_many_rows_are_shown_as_asked_and_bad_ones_left_out(run, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    row = json.dumps({"instruction": "say", "antwort": "10 ships"})
    path.write_text("\n".join("{" if n == 7 else row for n in range(100)))
    arguments = ("--input", path, "--map", "output=antwort", "--no-preamble")
    code, output = run(*arguments)
    assert code == 3 and f"{path}:8: not JSON" in output and "--skip-bad-rows N" in output
    for asked, count in ((1, 1), (70, 70), (1000, 89)):
        code, output = run(*arguments, "--skip-bad-rows", 1, "--show", asked)
        shown = re.findall(r"a\.jsonl:(\d+): \d+ tokens", output)
        # Each tenth row is for evaluation, and row 8 is broken.
        assert code == 0 and shown == [str(n) for n in range(1, 101) if n % 10 and n != 8][:count]
        assert output.split("a.jsonl:1: ")[1].split("\n")[1].startswith("### Instruction")
        assert f"[[10 ships{EOS}]]" in output  # no terminal, so no colors
        assert "output = antwort" in output and "1 bad rows were left out" in output and "in 89 documents" in output


@pytest.mark.slow
def test_the_script_works_from_anywhere_in_a_c_locale_and_waits_for_no_import_to_help(
    tmp_path: Path, small_tokenizer: Path
) -> None:
    (tmp_path / "a.txt").write_text("\u00e9t\u00e9\n" * 50, encoding="utf-8")
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    start = [sys.executable, str(TOOL), "--input", "a.txt", "--tokenizer", str(small_tokenizer)]
    done = subprocess.run(start, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "data/a-small/eval.bin.json").is_file() and "data/a-small/train.bin" in done.stdout
    start = [sys.executable, "-X", "importtime", str(TOOL), "--help"]
    done = subprocess.run(start, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert "tokenize-data --dataset tiny-shakespeare --model qwen" in done.stdout and "click" in done.stderr
    assert not re.search(r"\| +(numpy|tokenizers|rich|pyarrow|huggingface_hub)$", done.stderr, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_leaves_no_half_file(tmp_path: Path, small_tokenizer: Path, number: signal.Signals, code: int) -> None:
    (tmp_path / "a.txt").write_text("It's the king's 10 ships, isn't it?\n" * 1_000_000)
    out = tmp_path / "out"
    start = [sys.executable, str(TOOL), "--input", "a.txt", "--tokenizer", str(small_tokenizer), "--out-dir", "out"]
    # a background job of a shell ignores Ctrl-C, and so would what it starts
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(start, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        deadline = time.monotonic() + 300
        while not list(out.glob(".partial/.train*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == code and "Traceback" not in errors
    assert list(out.iterdir()) == []
