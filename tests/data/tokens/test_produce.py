"""Token files in the making: parts, and the same bytes however often and wherever the making was interrupted."""

import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_files import verified

from llmq.data.chat.encoded import EncodeOptions
from llmq.data.rows import find_sources
from llmq.data.rows.find_sources import Found, Request, find_files
from llmq.data.rows.row_files import Record
from llmq.data.tokens import pipeline, tokenize
from llmq.data.tokens import text as text_files
from llmq.data.tokens.cache import Manifest
from llmq.data.tokens.token_file import TokenFile, TokenWriter
from llmq.data.tokens.tokenize import cached
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.disk import cache_folder
from llmq.errors import DataError, StorageError

SMALL = {"PART_TOKENS": 400, "BATCH_CHARACTERS": 300, "ROWS_CHARACTERS": 500, "BATCH_ROWS": 7, "BLOCK_BYTES": 100}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts and batches; they are not forced onto the disk, which only a loss of power would show."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    for module in (pipeline, find_sources, text_files, tokenize):
        for name, value in SMALL.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


def unfollowed(done: int, total: int | None) -> None:
    """Progress that is not followed."""


def stop(done: int, total: int | None) -> None:
    """Progress that is interrupted half way."""
    if done > 60:
        raise KeyboardInterrupt


def asked_for(tokenizer: Path, path: Path, *, fraction: float | None = None, **more: Any) -> Request:
    found = find_files([str(path)], eval_fraction=fraction)
    return Request(found, TextTokenizer.open(str(tokenizer)), **more)


def rows(folder: Path, count: int = 120) -> Path:
    """Questions and answers."""
    path = folder / "rows.jsonl"
    made = [{"question": f"What is {n}?", "answer": "It's the king's " + "10 ships " * (n % 5)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def text(folder: Path, name: str = "text.txt", lines: int = 300) -> Path:
    """One document."""
    (folder / name).write_text("It's the king's 10 ships, isn't it? \u00e9t\u00e9\n" * lines)
    return folder / name


def content(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def texts(folder: Path) -> Path:
    """Many documents, so that parts end among them."""
    (folder / "texts").mkdir()
    for number in range(40):
        text(folder / "texts", f"{number}.txt", number % 7 + 1)
    return folder / "texts"


@pytest.mark.sample
@pytest.mark.parametrize("make", [rows, text, texts])
@pytest.mark.parametrize("seed", range(1, 4))
def test_an_interrupted_call_resumes_to_the_same_bytes(tmp_path: Path, small, call, make, seed) -> None:
    path = make(tmp_path)
    call(path, "whole")
    draw, breaks, said = random.Random(seed), 0, []

    def maybe_break(done: int, total: int | None) -> None:
        nonlocal breaks
        if draw.random() < 0.1:
            breaks += 1
            raise draw.choice([KeyboardInterrupt, SystemExit, OSError(28, "No space left on device")])

    while True:
        try:
            call(path, "parts", on_progress=maybe_break, say=said.append)
            break
        except (KeyboardInterrupt, SystemExit, OSError):
            names = {path.name for path in (tmp_path / "parts").iterdir()}
            assert names <= {".partial"}
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    assert breaks and any("resuming where" in text for text in said) == (make is not text)


@pytest.mark.parametrize(("holder", "when"), [(TokenWriter, "finish"), (Manifest, "write"), (TokenWriter, "append")])
def test_a_break_at_any_step_resumes(tmp_path: Path, monkeypatch, small, call, holder: type, when: str) -> None:
    """What an earlier run has left is unchanged until all is finished."""
    path = rows(tmp_path)
    call(path, "older", encode=EncodeOptions(train_on="all"))
    call(path, "whole")
    older, original = content(tmp_path / "older"), getattr(holder, when)
    for after, count in itertools.product((False, True), (1, 3)):
        left = iter(range(count, -1, -1))

        def broken(*args: Any, _left=left, _after=after, **more: Any) -> None:
            is_last = next(_left) == 0
            if _after or not is_last:
                original(*args, **more)
            if is_last:
                raise KeyboardInterrupt

        out = shutil.copytree(tmp_path / "older", tmp_path / f"out-{after}-{count}")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(holder, when, broken)
            call(path, out)
        assert {name: data for name, data in content(out).items() if not name.startswith(".partial")} == older
        call(path, out)
        assert content(out) == content(tmp_path / "whole")


def test_finished_parts_are_not_made_again_unless_the_data_is_other(tmp_path: Path, monkeypatch, small, call) -> None:
    path, encoded, said = rows(tmp_path), list[int](), list[str]()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            call(path, on_progress=stop)
    work = shutil.copytree(tmp_path / "out", tmp_path / "other") / ".partial"
    made = {path.name: path.stat().st_ino for path in (tmp_path / "out/.partial").glob("*.bin")}
    assert len(made) > 1 and not list(work.glob(".*"))  # nothing half-written
    first, real = TokenFile.open(work / "train-000.bin").num_documents, pipeline.RowWork.encode
    monkeypatch.setattr(pipeline.RowWork, "encode", lambda self, batch: encoded.append(1) or real(self, batch))
    files = call(path)
    assert made.items() <= {file.path.name: file.path.stat().st_ino for file in files}.items()
    assert len(encoded) <= (120 - first) // 7 + 3
    path.write_text(path.read_text().replace("king", "queen"))
    call(path, "other", say=said.append)
    call(path, "whole")
    assert not any("resuming" in text for text in said) and content(tmp_path / "other") == content(tmp_path / "whole")


def test_a_killed_call_resumes_to_the_same_bytes(tmp_path: Path, small, call) -> None:
    """It kills itself after some batches, with the threads of the pipeline at work; nothing half-written is left."""
    path, said, calls = rows(tmp_path), list[str](), iter(range(9))

    def kill(done: int, total: int | None) -> None:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=call, args=(path,), kwargs={"on_progress": kill})
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    for folder in (tmp_path / "out", tmp_path / "out/.partial"):  # as where it is killed while it copies the tokenizer
        (folder / ".tokenizer.0.tmp").mkdir()
        (folder / ".tokenizer.0.tmp/tokenizer.json").write_text("half")
    for out in ("out", "whole"):
        call(path, out, say=said.append)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not list((tmp_path / "out").glob(".*")) and sum("resuming where" in text for text in said) == 1


def test_parts_end_with_documents_and_hold_everything(tmp_path: Path, monkeypatch, small, call) -> None:
    path = rows(tmp_path)
    files = call(path, eval_fraction=0)
    assert [file.path.name for file in files] == [f"train-{n:03d}.bin" for n in range(len(files))]
    assert len(files) > 2 and all(file.num_tokens >= 400 for file in files[:-1])
    assert sum(file.num_documents for file in files) == 120
    for file in files:
        verified(file.path)
        assert np.all(file.tokens[file.document_starts[1:] - 1] == 0)  # EOS
        assert file.num_tokens - np.diff(file.document_starts)[-1] < 400
    monkeypatch.setattr(tokenize, "PART_TOKENS", 10**9)
    (one,) = call(path, "one", eval_fraction=0)
    assert one.path.name == "train.bin"
    np.testing.assert_array_equal(np.concatenate([file.tokens for file in files]), one.tokens)
    trained = [file.trained(0, file.num_tokens) for file in files]
    np.testing.assert_array_equal(np.concatenate(trained), one.trained(0, one.num_tokens))


def test_the_first_tokens_are_for_evaluation_and_a_limit_ends_after_a_part(
    tmp_path: Path, small, small_tokenizer: Path
) -> None:
    """llm.q's rule for web text: eval.bin first, then parts, until eval and parts reach the limit."""
    found = find_files([str(rows(tmp_path, 400))], eval_fraction=0.0)
    found = Found("web", ("web",), found.train, None, "rule", eval_tokens=500, limit=1300, numbered=True)
    request = Request(found, TextTokenizer.open(str(small_tokenizer)))
    files = [TokenFile.open(path) for path in cached(request, unfollowed, print)]
    assert [file.path.name for file in files] == ["eval.bin", "train-000.bin", "train-001.bin"]
    sizes = [file.num_tokens for file in files]
    assert 500 <= sizes[0] < 600 and 400 <= sizes[1] < 500 and 400 <= sizes[2] < 500 and sum(sizes[:2]) < 1300
    plain = find_files([str(tmp_path / "rows.jsonl")], eval_fraction=0.0)
    encoder = request.encoder()
    assert encoder is not None and not isinstance(plain.train, text_files.Texts)
    records = [row for _, row in plain.train.read() if isinstance(row, Record)]
    ids = np.concatenate([document.ids for document in encoder.encode(records)])
    np.testing.assert_array_equal(np.concatenate([file.tokens for file in files]), ids[: sum(sizes)])


def test_two_that_ask_at_once_share_one_entry(tmp_path: Path, small_tokenizer: Path) -> None:
    """Each as if it were a process of its own, by the lock's file alone; see test_cache.py for processes."""
    path, said = rows(tmp_path, 2000), list[str]()

    def ask(number: int) -> list[Path]:
        return cached(asked_for(small_tokenizer, path), unfollowed, said.append)

    with ThreadPoolExecutor(3) as pool:
        one, *others = pool.map(ask, range(3))
    assert others == [one, one] and [path.name for path in one] == ["eval.bin", "train.bin"]
    assert sum("format: question-answer" in text for text in said) == 1  # one has made it
    assert list(cache_folder("tokens").iterdir()) == [one[0].parent]  # no lock, no partial folder


def test_what_decides_on_the_tokens_decides_on_the_entry(tmp_path: Path, monkeypatch, small_tokenizer: Path) -> None:
    path, folder, written = rows(tmp_path), tmp_path / "tokenizer", tmp_path / "t.jinja"
    shutil.copytree(small_tokenizer, folder)
    monkeypatch.setenv("HOME", str(tmp_path))

    def entry(fraction: float | None = None, **options: Any) -> Path:
        return asked_for(folder, path, fraction=fraction, encode=EncodeOptions(**options)).entry

    assert entry() == entry(0.1)
    found = [
        entry(), entry(0.2), entry(0.0), entry(train_on="all"), entry(seq_len=5), entry(seq_len=6),
        entry(overlong="drop"), entry(chat_template="{{ x }}"),
    ]  # fmt: skip
    for content in ("{{ messages }}", "{{ messages }} "):
        written.write_text(content)
        found.append(entry(chat_template="~/t.jinja"))
        assert found[-1] == entry(chat_template=str(written)) == entry(chat_template=content)  # whatever it is called
    for token in ("<s>", "<bos>"):
        (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": token}))
        found.append(entry(chat_template="{{ bos_token }}"))
    for name in ("own", "other"):
        (folder / "chat_template.jinja").write_text(name)
        found += [entry(chat_template="tokenizer"), entry(chat_template="{{ messages }}")]
    path.write_text(path.read_text() + '{"question": "a", "answer": "b"}\n')
    found.append(entry())
    assert len(set(found)) == len(found)


def test_text_has_one_entry_for_all_lengths_and_chats_one_for_each(
    tmp_path: Path, monkeypatch, small_tokenizer: Path
) -> None:
    """Which it is, is not asked of the rows where an entry is there."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{n} ships"}) + "\n" for n in range(40)))
    reads, real = list[int](), Request.first_rows.func  # type: ignore[attr-defined]
    monkeypatch.setattr(Request, "first_rows", property(lambda self: reads.append(1) or real(self)))

    def asked(path: Path, overlong: str = "turns") -> list[Request]:
        options = [EncodeOptions(seq_len=seq_len, overlong=overlong) for seq_len in (30, 40)]
        return [asked_for(small_tokenizer, path, encode=one).settled() for one in options]

    for path, entries in ((tmp_path / "a.jsonl", 1), (text(tmp_path), 1), (rows(tmp_path), 2)):
        reads.clear()
        made = {request.entry for request in asked(path)}
        assert len(made) == entries and len(reads) == (0 if path.suffix == ".txt" else 2)
        for request in asked(path):
            cached(request, unfollowed, say=print)
        reads.clear()
        assert {request.entry for request in asked(path)} == made and not reads
        assert len({request.entry for request in asked(path, "drop")} | made) == 2 + len(made)


def test_notes_on_rows_are_given_by_every_call_that_finds_them(tmp_path: Path, small_tokenizer: Path) -> None:
    request, said = asked_for(small_tokenizer, rows(tmp_path), encode=EncodeOptions(seq_len=22)), list[str]()
    for times in (1, 2):
        cached(request, unfollowed, said.append)
        assert sum(text.startswith("2 rows of more than 22 tokens") for text in said) == times


def test_an_entry_that_is_not_whole_is_made_again(tmp_path: Path, small, small_tokenizer: Path) -> None:
    asked, said = asked_for(small_tokenizer, rows(tmp_path)), list[str]()
    files = cached(asked, unfollowed, print)
    entry, whole = files[0].parent, content(files[0].parent)
    damages: list[Callable[[], object]] = [
        files[1].unlink, (entry / "tokenizer/tokenizer.json").unlink, (entry / "manifest.json").unlink,
        lambda: files[0].write_bytes(files[0].read_bytes()[:-8]), lambda: [path.unlink() for path in entry.glob("*.*")],
    ]  # fmt: skip
    for damage in (lambda: None, *damages):
        damage()
        assert cached(asked, unfollowed, said.append) == files
        # Only the time at which it was begun may be another, where the manifest was lost.
        assert {**content(entry), "manifest.json": b""} == {**whole, "manifest.json": b""}
        assert said[:1] == [f"{entry} has changed since it was made: making it again"] * (damage in damages)
        assert [path.name for path in entry.parent.iterdir()] == [entry.name]
        said.clear()


DATED = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}{{ strftime_now('@%H%M%S%f') }}"


def test_a_date_is_that_of_the_beginning(tmp_path: Path, small, call, small_tokenizer: Path) -> None:
    """One date, in files that an interrupted call began, and in an entry of the cache for as long as it is known."""
    encode, path = EncodeOptions(chat_template=DATED, train_on="all"), rows(tmp_path)
    opened = TextTokenizer.open(str(small_tokenizer))

    def dates(files: list[Path]) -> set[str]:
        text = "".join(opened.encoder.decode(TokenFile.open(file).tokens.tolist()) for file in files)
        return set(re.findall(r"@\d{12}", text.replace(" ", "")))

    with pytest.raises(KeyboardInterrupt):
        call(path, eval_fraction=0.0, encode=encode, on_progress=stop)
    assert len(dates([file.path for file in call(path, eval_fraction=0.0, encode=encode)])) == 1
    first = cached(asked_for(small_tokenizer, path, fraction=0.0, encode=encode), unfollowed, print)
    began = dates(first)
    first[0].unlink()
    again = cached(asked_for(small_tokenizer, path, fraction=0.0, encode=encode), unfollowed, print)
    assert first == again and dates(again) == began and len(began) == 1


def test_files_of_an_earlier_run_are_not_left_beside_new_ones(tmp_path: Path, monkeypatch, small, call) -> None:
    call(rows(tmp_path))
    short = rows(tmp_path, 20)
    with pytest.raises(StorageError, match=r"eval\.bin is of an earlier run and would stay beside the new files"):
        call(short, eval_fraction=0)
    with pytest.raises(StorageError, match=r"train-000\.bin.* are of an earlier run.*choose another --out-dir"):
        call(short)
    for path in (tmp_path / "out").glob("train-*.bin"):
        path.unlink()
    monkeypatch.setattr(tokenize, "tokenized", lambda *_: pytest.fail("it is finished: it has only to be moved"))
    assert [file.path.name for file in call(short)] == ["train.bin", "eval.bin"]
    assert not (tmp_path / "out/.partial").exists()


def test_finished_files_that_are_moved_only_in_part_are_made_again(tmp_path: Path, monkeypatch, small, call) -> None:
    path, out, real, left = rows(tmp_path), tmp_path / "out", os.replace, iter("two")
    call(path, "whole")

    def replace(source: Path, target: Path) -> None:
        if target.parent == out and target.suffix == ".bin" and next(left) == "o":
            raise KeyboardInterrupt
        real(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", replace)
        call(path)
    call(path)
    assert content(out) == content(tmp_path / "whole")


def with_bad(path: Path, *places: int) -> Path:
    lines = path.read_text().splitlines()
    path.write_text("".join("{\n" if at in places else f"{line}\n" for at, line in enumerate(lines)))
    return path


def test_bad_rows_are_counted_over_an_interruption_and_over_training_and_evaluation(
    tmp_path: Path, small, call, small_tokenizer: Path
) -> None:
    path, said = with_bad(rows(tmp_path), 20, 50, 80, 110), list[str]()
    with pytest.raises(DataError, match=r"rows\.jsonl:81: not JSON.*; 2 before it left out"):
        call(path, eval_fraction=0, skip_bad_rows=2)
    with pytest.raises(DataError, match=r"rows\.jsonl:111: not JSON.*; 3 before it left out"):
        call(path, eval_fraction=0, skip_bad_rows=3)  # resumes after the first ones
    (*_, last) = call(path, eval_fraction=0, skip_bad_rows=4, say=said.append)
    assert "4 bad rows were left out" in said and last.num_tokens
    path = with_bad(rows(tmp_path, 40), 4, 19, 39)  # each tenth row is for evaluation, from the tenth on
    with pytest.raises(DataError, match=r"rows\.jsonl:40: not JSON.*; 2 before it left out"):
        call(path, "two", skip_bad_rows=2)
    files = call(path, "three", skip_bad_rows=3)
    assert sum(file.num_documents for file in files) == 37 and files[-1].num_documents == 2
    for allowed in (5, 3):
        assert cached(asked_for(small_tokenizer, path, skip_bad_rows=allowed), unfollowed, print)
    with pytest.raises(DataError, match=r"3 bad rows were left out when it was tokenized.*--skip-bad-rows 3"):
        cached(asked_for(small_tokenizer, path, skip_bad_rows=2), unfollowed, print)


def test_data_that_trains_nothing_leaves_nothing_and_a_small_set_may_evaluate_nothing(
    tmp_path: Path, call, small_tokenizer: Path
) -> None:
    path, said = rows(tmp_path, 3), list[str]()
    with pytest.raises(DataError, match=r"the evaluation data has no token to train on.*--eval-fraction 0"):
        call(path, eval_fraction=0.3, say=said.append)  # of 3 rows, that is none
    assert not list((tmp_path / "out").iterdir()) and not any("resumes from there" in text for text in said)
    for overlong, why in (
        ("truncate", "3 of 3 rows have no trained token"),  # only the beginning of the question is left
        ("turns", r"documents, 3 of 3 rows are too long: --seq-len 17 keeps all\)"),
    ):
        with pytest.raises(DataError, match=f"the training data has no token to train on.*{why}"):
            call(path, eval_fraction=0, encode=EncodeOptions(seq_len=2, overlong=overlong))
    assert not list((tmp_path / "out").iterdir())
    (written,) = call(path, say=said.append)  # a tenth of them is none
    assert written.num_documents == 3 and any("nothing is evaluated" in text for text in said)
    for _ in range(2):  # made, and found
        said.clear()
        (train,) = cached(asked_for(small_tokenizer, path), unfollowed, said.append)
        assert train.name == "train.bin" and any("nothing is evaluated" in text for text in said)
    with pytest.raises(DataError, match=r"the evaluation data has no token to train on.*--eval-fraction 0"):
        cached(asked_for(small_tokenizer, path, fraction=0.1), unfollowed, print)
