"""Whole tokenizations: the ids of the library on the whole text, files, sidecars."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sample_files import verified
from tokenizers import Tokenizer

from llmq.cli import shell
from llmq.cli.tokenize_data import command
from llmq.data.batches.loader import open_data
from llmq.data.tokens import text as text_files
from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenize import tokenize_data
from llmq.data.tokens.tokenizer import Sidecar
from llmq.errors import DataError, StorageError
from llmq.options.data import DataOptions

SMALL = {"batch_size": 1, "seq_len": 4, "grad_accumulation": 1}


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
    options = DataOptions(train_file=str(out / "train.bin"), eval_file=str(out / "eval.bin"), **SMALL)
    assert open_data(options, train.header.vocab_size, 0).tokenizer_folder() == out / "tokenizer"  # type: ignore[arg-type]


def test_files_of_two_tokenizers_are_not_mixed(tmp_path: Path, small_tokenizer: Path, call) -> None:
    (tmp_path / "a.txt").write_text("some text for two tokenizers\n" * 9)
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text((small_tokenizer / "tokenizer.json").read_text() + "\n")
    for name in (small_tokenizer, other):
        call(tmp_path / "a.txt", name.name, tokenizer=str(name))
    for files in ({"train_file": "*/train.bin"}, {"train_file": "small/train.bin", "eval_file": "other/eval.bin"}):
        options = DataOptions(**{key: str(tmp_path / name) for key, name in files.items()}, **SMALL)
        with pytest.raises(DataError, match=r"of different tokenizers: .*(other.*small|small.*other)"):
            open_data(options, 999, 0)


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


def test_a_stale_eval_file_is_not_left_beside_new_training_data(tmp_path: Path, call) -> None:
    (tmp_path / "a.txt").write_text("x\ny\n" * 9)
    call(tmp_path / "a.txt")
    call(tmp_path / "a.txt")
    with pytest.raises(StorageError, match=r"eval\.bin is of an earlier run"):
        call(tmp_path / "a.txt", eval_fraction=0)


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


def test_a_call_without_a_tokenizer_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_text("some text\n")
    assert shell.run(command, ["--input", str(tmp_path / "a.txt"), "--out-dir", str(tmp_path / "out")]) == 2
    assert (
        "whose tokenizer makes the tokens? Give --model" in capsys.readouterr().err and not (tmp_path / "out").exists()
    )
