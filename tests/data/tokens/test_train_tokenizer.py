"""tokenize-data --train-tokenizer: a new tokenizer on the text to train on, lossless, the same each time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from token_files import verified
from tokenizers import Tokenizer

from llmq.cli import shell
from llmq.cli.tokenize_data import command
from llmq.data.tokens import tokenize
from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenize import tokenize_data
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.errors import DataError

WORDS = "".join(f"def name{number}(value):\n    return value + {number}\n\n" for number in range(300))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text file of some thousand words."""
    (tmp_path / "a.txt").write_text(WORDS)
    return tmp_path / "a.txt"


def test_the_token_files_are_those_of_the_tokenizer_beside_them(text: Path, tmp_path: Path) -> None:
    arguments = ["--input", str(text), "--train-tokenizer", "400", "--eval-fraction", "0"]
    assert shell.run(command, [*arguments, "--out-dir", str(tmp_path / "out")]) == 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer/tokenizer.json"))
    tokens = verified(tmp_path / "out/train.bin", 400).tokens.tolist()
    assert tokenizer.get_vocab_size() == 400
    assert tokens.pop() == tokenizer.token_to_id("<|endoftext|>") == 0
    assert tokenizer.decode(tokens) == WORDS
    assert tokens == tokenizer.encode(WORDS).ids, "tokenized in pieces as in one"
    note = json.loads((tmp_path / "out/train.bin.json").read_text())["tokenizer"]
    assert note["source"] == str(tmp_path / "out/tokenizer") and note["eos_token_id"] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.name[0] != ".") == [
        "tokenizer",
        "train.bin",
        "train.bin.json",
    ]


def test_it_is_lossless_on_text_that_it_never_saw(text: Path, tmp_path: Path) -> None:
    tokenize_data(train_tokenizer=300, inputs=[str(text)], out_dir=tmp_path / "out")
    tokenizer = TextTokenizer.open(str(tmp_path / "out/tokenizer"))
    assert tokenizer.in_pieces and (tokenizer.vocab_size, tokenizer.begin_ids) == (300, ())
    for unseen in ("class Reader: ...", "\t\r\n  \u00e9\u4e2d\U0001f600\x00"):
        assert tokenizer.encoder.decode(tokenizer.encoder.encode(unseen).ids) == unseen


def test_the_same_text_gives_the_same_bytes_and_the_held_out_text_has_no_part(tmp_path: Path) -> None:
    """Of two files the second one is held out: its words are no tokens."""
    for name, content in (("a", WORDS), ("b", "quokka " * 1000)):
        (tmp_path / f"{name}.txt").write_text(content)
    made = []
    for name in ("one", "two"):
        tokenize_data(train_tokenizer=350, inputs=[str(tmp_path / "*.txt")], eval_fraction=0.5, out_dir=tmp_path / name)
        made.append([(tmp_path / name / file).read_bytes() for file in ("tokenizer/tokenizer.json", "train.bin")])
    assert made[0] == made[1]
    assert not any("quok" in token for token in Tokenizer.from_buffer(made[0][0]).get_vocab())


def test_text_that_is_too_little_names_the_size_that_it_is_enough_for(text: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--train-tokenizer 50000: the text is enough for") as raised:
        tokenize_data(train_tokenizer=50_000, inputs=[str(text)], out_dir=tmp_path / "out")
    enough = int(str(raised.value).rsplit(" ", 1)[1])
    tokenize_data(train_tokenizer=enough, inputs=[str(text)], out_dir=tmp_path / "out")
    assert TokenFile.open(tmp_path / "out/train.bin").header.vocab_size == enough


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give the tokenizer either as --model or as --train-tokenizer"),
        (["--train-tokenizer", "300", "--eos-token", "x"], "--eos-token are for the tokenizer of --model"),
        (["--train-tokenizer", "300", "--revision", "x"], "--revision and --eos-token"),
        (["--train-tokenizer", "300", "--input", "rows.jsonl"], "is for text, but rows.jsonl is rows: give --model"),
    ],
)
def test_contradictions_are_refused(arguments, says: str, text: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "one"}\n' * 20)
    given = ["--out-dir", "out", *arguments, *([] if "--input" in arguments else ["--input", str(text)])]
    assert shell.run(command, given) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_call_that_fails_leaves_the_earlier_files_whole(text: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "out"
    tokenize_data(train_tokenizer=300, inputs=[str(text)], out_dir=out)
    before = shutil.copytree(out, tmp_path / "before")

    def fail(*_: object, **__: object) -> None:
        raise DataError("lost")

    monkeypatch.setattr(tokenize, "make", fail)
    with pytest.raises(DataError, match="lost"):
        tokenize_data(train_tokenizer=320, inputs=[str(text)], out_dir=out)
    files = {path.relative_to(before): path.read_bytes() for path in before.rglob("*") if path.is_file()}
    assert {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()} == files
