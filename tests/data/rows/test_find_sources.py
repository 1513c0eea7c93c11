"""What a name or path means: files, folders, globs and splits, and which part is kept for evaluation."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from llmq.data.chat.encoded import EncodeOptions
from llmq.data.rows import find_sources
from llmq.data.rows.find_sources import NAMED, Found, find_anything, find_files, tiny_shakespeare
from llmq.data.tokens.text import Texts, pieces
from llmq.errors import DataError


def write(path: Path, *numbers: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    head, line = {".csv": ("n\n", "{}\n"), ".txt": ("", "line {}\n")}.get(path.suffix, ("", '{{"n": {}}}\n'))
    path.write_text(head + "".join(map(line.format, numbers)))
    return path


def numbers(part: Any) -> list[int]:
    return [int(row.value["n"]) for _, row in part.read()]


def test_files_and_globs_are_one_set_of_rows(tmp_path: Path) -> None:
    one, two = write(tmp_path / "in/a.jsonl", *range(15)), write(tmp_path / "in/b.jsonl", *range(15, 30))
    for inputs in ([str(one), str(two)], [str(tmp_path / "in/*.jsonl")]):
        found = find_files(inputs)
        assert numbers(found.evaluation) == [9, 19, 29]
        assert sorted(numbers(found.train) + numbers(found.evaluation)) == list(range(30))
        assert (found.title, found.asked, found.num_bytes) == ("in", tuple(inputs), None)
        assert "0.1 of them, spread evenly" in found.rule
    none = find_files([str(one)], eval_fraction=0)
    assert none.evaluation is None and numbers(none.train) == list(range(15)) and none.title == "a"


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name, content in (("a.txt", "one\ntwo\n"), ("b.txt", "three"), ("c.txt", "")):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
    found = find_files([str(tmp_path / "*.txt")], eval_fraction=0)
    assert isinstance(found.train, Texts) and found.num_bytes == 13
    assert ["".join(pieces(document, True)) for document in found.train.documents] == ["one\ntwo\n", "three"]
    with pytest.raises(DataError, match=r"there is no text in .*c\.txt"):
        find_files([str(tmp_path / "c.txt")])


def test_a_folder_has_splits_by_name(tmp_path: Path) -> None:
    for name, *rows in (
        ("train-0.jsonl", 1, 2), ("sub/train-1.jsonl", 3), ("valid/a.jsonl", 4), ("test.jsonl", 5), (".hidden.csv", 6),
        (".git/x.csv", 6), ("README.md", 7), ("dataset_infos.json", 8),
    ):  # fmt: skip
        write(tmp_path / "set" / name, *rows)
    found = find_files([str(tmp_path / "set")])
    assert (numbers(found.train), numbers(found.evaluation), found.title) == ([3, 1, 2], [4], "set")
    asked = find_files([str(tmp_path / "set")], eval_fraction=0.34)
    assert numbers(asked.evaluation) == [2] and numbers(asked.train) == [3, 1]
    (tmp_path / "set/valid/a.jsonl").unlink()
    assert numbers(find_files([str(tmp_path / "set")], streaming=True).train) == [3, 1, 2]
    assert find_files([str(tmp_path / "set")], streaming=True).evaluation is None


def test_a_folder_of_text_is_documents(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / f"books/{number:02d}.txt", *range(10, 20))
    found = find_files([str(tmp_path / "books")])
    assert isinstance(found.train, Texts) and isinstance(found.evaluation, Texts)
    assert (len(found.train.documents), len(found.evaluation.documents), found.num_bytes) == (18, 2, 20 * 80)
    assert "one file is one document" in found.rule


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (["a.jsonl", "b.csv"], r"of several kinds \(1 jsonl, 1 csv\)"),
        (["a.jsonl", "b.txt"], r"of several kinds \(1 jsonl, 1 text\)"),
        (["validation.jsonl", "test.jsonl"], "the splits validation, test, but no train"),
        (["a.md"], "has no data: no file in it ends with .jsonl"),
        (["a.txt.gz"], "text files are read as they are: decompress it"),
    ],
)
def test_a_folder_that_is_not_clear_is_refused(tmp_path: Path, make: list[str], says: str) -> None:
    for name in make:
        write(tmp_path / "set" / name, 1, 2)
    with pytest.raises(DataError, match=says):
        find_files([str(tmp_path / "set")])


def test_a_name_is_a_path_a_named_set_or_of_the_hub(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    hub = Found("hub", (), Texts(()), None, "")
    monkeypatch.setattr(find_sources, "_hub", lambda text, *how: asked.append(text) or hub)
    monkeypatch.setattr(find_sources, "tiny_shakespeare", lambda: write(tmp_path / "tiny.txt", *range(100)))
    write(tmp_path / "org/name/a.jsonl", 1, 2)
    write(tmp_path / "train[1].jsonl", 1)
    assert numbers(find_anything("org/name", 0).train) == [1, 2]
    assert numbers(find_anything("org/*/a.jsonl", 0).train) == [1, 2]
    assert numbers(find_anything("train[1].jsonl", 0).train) == [1]
    assert find_anything("tiny-shakespeare", None).asked == ("tiny-shakespeare",)
    for text in ("wikitext:wikitext-2-raw-v1:train[:10%]", "org/other", "wikitext"):
        assert find_anything(text, None) == hub and asked[-1] == text
    for text in ("./gone", "gone.jsonl", "/gone", "gone/*.csv"):
        with pytest.raises(DataError, match=r"gone.*: (check the path|cannot be read)"):
            find_anything(text, None).identity()
    assert len(asked) == 3


def test_what_is_known_of_a_set_gives_way_to_what_is_asked() -> None:
    found = Found("x", ("x",), Texts(()), None, "", data_format="text", mapping=(("text", "body"),))
    assert found.known(EncodeOptions()) == EncodeOptions("text", (("text", "body"),))
    asked = EncodeOptions("messages", (("messages", "m"),))
    assert found.known(asked) == asked


def test_the_named_sets_are_those_of_llmq() -> None:
    assert " ".join(NAMED) == "tiny-stories gsm8k limo fineweb-1b fineweb-10b climb-1b climb-10b climb-20b"
    assert len(find_sources.CLIMB_WEIGHTS) == 20


def test_tiny_shakespeare_is_fetched_once_checked_and_found_offline(monkeypatch, tmp_path: Path) -> None:
    text, source = b"First Citizen:\nBefore we proceed any further, hear me speak.\n", tmp_path / "input.txt"
    monkeypatch.setattr(find_sources, "TINY_URL", source.as_uri())

    def refused(says: str) -> None:
        with pytest.raises(DataError, match=rf"{says}.*save .* as .*tiny-shakespeare\.txt"):
            tiny_shakespeare()

    refused("cannot be fetched .*No such file")
    source.write_bytes(text)
    refused(f"gave {len(text)} bytes that are not tiny-shakespeare")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("HF_HUB_OFFLINE forbids")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(find_sources, "TINY_SHA256", hashlib.sha256(text).hexdigest())
    path = tiny_shakespeare()
    source.unlink()
    assert tiny_shakespeare() == path and path.read_bytes() == text and list(path.parent.iterdir()) == [path]
