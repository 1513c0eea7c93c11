"""Tokenizing in batches: order, positions, threads that end, and as fast as the tokenizers library alone."""

import json
import os
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_tokenizers import EOS, byte_level, save
from tokenizers import processors

from llmq.data.chat.encode import open_encoder
from llmq.data.chat.encoded import EncodeOptions
from llmq.data.rows.find_sources import Request, find_files
from llmq.data.rows.row_files import Record
from llmq.data.stream import Position
from llmq.data.tokens import pipeline
from llmq.data.tokens.pipeline import RowWork, TextWork, TokenBatch, Workers, tokenized
from llmq.data.tokens.text import open_documents, pieces
from llmq.data.tokens.tokenizer import TextTokenizer
from llmq.errors import DataError, LlmqError

ROOT = Path(__file__).parents[3]


def joined(found: Iterable[TokenBatch]) -> tuple[list[int], list[int]]:
    """All ids, and where documents end in them."""
    ids, stops = list[int](), list[int]()
    for batch in found:
        stops += (batch.tokens.stops + len(ids)).tolist()
        ids += batch.tokens.ids.tolist()
    return ids, stops


@pytest.mark.parametrize("in_pieces", [True, False])
@pytest.mark.parametrize("begins", [False, True])
def test_text_begins_and_ends_once_and_continues_after_any_batch(
    tmp_path: Path, monkeypatch, begins: bool, in_pieces: bool
) -> None:
    """Also where the tokenizer itself puts a token before a text; text that spells a special one is ordinary text.

    A long row is tokenized as a text file is.
    """
    monkeypatch.setattr("llmq.data.tokens.tokenizer.tokenizes_in_pieces", lambda description: in_pieces)
    monkeypatch.setattr(pipeline, "BATCH_CHARACTERS", 200)
    monkeypatch.setattr("llmq.data.tokens.text.BLOCK_BYTES", 40)
    made = byte_level(added=("[begin]",))
    begin, eos = (made.token_to_id(token) for token in ("[begin]", EOS))
    if begins:
        made.post_processor = processors.TemplateProcessing(single="[begin] $A", special_tokens=[("[begin]", begin)])
    tokenizer = TextTokenizer.open(str(save(made, tmp_path / "t", {"eos_token": EOS})))
    made.encode_special_tokens = True
    texts = [
        "It's the king's \u00e9t\u00e9 \U0001f600 <|endoftext|> isn't it?\n" * (3 + 9 * number) for number in range(3)
    ] + ["b"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    work = TextWork(open_documents(sorted(tmp_path.glob("*.txt"))), tokenizer)
    positions, found = zip(*tokenized(work), strict=True)
    ids, stops = joined(found)
    wholes = [[begin] * begins + made.encode(text, add_special_tokens=False).ids + [eos] for text in texts]
    assert ids == [number for whole in wholes for number in whole]
    assert stops == np.cumsum([len(whole) for whole in wholes]).tolist()
    assert len(found) > (5 if in_pieces else 1) and sum(tokens.num_bytes for tokens in found) == sum(
        len(text.encode()) for text in texts
    )
    monkeypatch.setattr("llmq.data.chat.encode.ENCODED_AT_ONCE", 100)
    records = [Record(f"a:{n}", {"text": text}) for n, text in enumerate(texts)]
    documents = open_encoder(records, tokenizer, EncodeOptions()).encode(records)
    assert [document.ids.tolist() for document in documents] == wholes
    for count, position in enumerate(positions, 1):
        rest, _ = joined(tokens for _, tokens in tokenized(work, position))
        assert rest == ids[sum(len(before.tokens.ids) for before in found[:count]) :]


def row_work(folder: Path, tokenizer: Path, bad: tuple[int, ...] = ()) -> RowWork:
    """Of 100 rows."""
    lines = [json.dumps({"question": f"What is {n}?", "answer": "10 " * (n % 9 + 1)}) for n in range(100)]
    for at in bad:
        lines[at] = '{"text": 3}' if at % 2 else "no JSON"
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    request = Request(find_files([str(folder / "a.jsonl")], 0.0), TextTokenizer.open(str(tokenizer)))
    work = request.work(request.found.train, request.encoder())
    assert isinstance(work, RowWork)
    return work


def test_rows_keep_their_order_and_bad_ones_their_place(tmp_path: Path, monkeypatch, small_tokenizer: Path) -> None:
    monkeypatch.setattr(pipeline, "BATCH_ROWS", 8)
    work = row_work(tmp_path, small_tokenizer, bad=(7, 20, 21, 22, 99))
    found = [tokens for _, tokens in tokenized(work)]
    assert [row.place.rsplit(":", 1)[1] for tokens in found for row in tokens.bad] == ["8", "21", "22", "23", "100"]
    assert sum(tokens.counts.rows for tokens in found) == 95 and len(joined(found)[1]) == 95
    whole = row_work(tmp_path, small_tokenizer)
    records = [row for _, row in whole.rows.read() if isinstance(row, Record)]
    monkeypatch.setattr(pipeline, "BATCH_ROWS", 1000)
    alone = [np.concatenate([d.ids for d in whole.encoder.encode([record])]) for record in records]
    ((_, once),) = tokenized(whole)
    ids, trained, _ = once.tokens
    np.testing.assert_array_equal(ids, np.concatenate(alone))
    assert trained is not None and 0 < trained.sum() < len(ids)


@dataclass
class Slow:
    """40 batches, or more, that say when they are read and encoded, and fail where they should."""

    fail_read: int = -1
    fail_encode: int = -1
    count: int = 40
    begun: int = 0

    def read(self, position: Position = ()) -> Iterator[tuple[Position, int]]:
        for number in range(self.count):
            if number == self.fail_read:
                raise DataError("read")
            self.begun = number + 1
            yield (number + 1,), number

    def encode(self, batch: int) -> int:
        time.sleep(0.003 * (batch % 3))
        if batch == self.fail_encode:
            raise DataError("encode")
        return batch


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(("llmq-read", "llmq-tokenize"))]


def test_batches_come_in_order_and_errors_in_their_place_and_threads_end_with_the_iterator() -> None:
    """And little is read ahead."""
    assert list(tokenized(Slow())) == [((n + 1,), n) for n in range(40)]
    for work, says in ((Slow(fail_read=9), "read"), (Slow(fail_encode=9), "encode")):
        batches = tokenized(work)
        assert [next(batches)[1] for _ in range(9)] == list(range(9))
        with pytest.raises(DataError, match=says):
            next(batches)
    assert not workers()
    work = Slow(count=10_000)
    batches = tokenized(work)
    assert next(batches)[1] == 0
    time.sleep(0.1)
    assert work.begun <= 2 + 2 * pipeline.AT_ONCE and workers()
    batches.close()
    assert not workers()


def test_many_rows_are_tokenized_by_processes_as_by_one(tmp_path: Path, monkeypatch, small_tokenizer: Path) -> None:
    """Few are not; a second stream has the same processes. They end when they are closed; a lost one is reported."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*arguments: Any, **about: Any) -> subprocess.Popen[bytes]:
        started.append(real(*arguments, **about))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    work = replace(row_work(tmp_path, small_tokenizer, bad=(7, 20, 21, 22, 99)), most=4)
    assert len(list(tokenized(replace(work, most=10), workers=Workers(work.encoder, 3)))) == 10 < pipeline.FEW
    alone = list(tokenized(work))
    assert not started
    with closing(Workers(work.encoder, 3)) as workers:
        for (one_after, one), (after, other) in zip(alone * 2, twice(work, workers), strict=True):
            assert (one_after, one.counts, one.positions) == (after, other.counts, other.positions)
            assert list(map(str, one.bad)) == list(map(str, other.bad))
            for mine, theirs in zip(one.tokens, other.tokens, strict=True):
                np.testing.assert_array_equal(mine, theirs)
    assert 1 <= len(started) < 3 and {process.returncode for process in started} == {0}
    with closing(Workers(work.encoder, 2)) as workers:
        before = len(started)
        batches = tokenized(work, workers=workers)
        next(batches)
        while len(started) == before:
            time.sleep(0.01)
        started[-1].kill()
        with pytest.raises(LlmqError, match=r"a process that tokenized rows has ended \(exit code -9\)"):
            list(batches)


def twice(work: RowWork, workers: Workers) -> Iterator[tuple[Position, TokenBatch]]:
    """As two streams, one after the other."""
    for _ in range(2):
        yield from tokenized(work, workers=workers)


def corpus(path: Path, shared: Callable[[str], Path], num_bytes: int) -> Path:
    """Text of the shared data and of Python's library, so often that it is so long, to the next line."""
    names = ("tinyshakespeare.txt", "wikitext2-valid.txt", "wikitext2-test.txt", "gsm8k-train.jsonl")
    parts = [shared(name).read_bytes() for name in names]
    parts += [file.read_bytes() for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    text = b"".join(parts)
    whole, rest = divmod(num_bytes, len(text))
    with path.open("wb") as file:
        for _ in range(whole):
            file.write(text)
        file.write(text[: text.index(b"\n", rest) + 1])
    return path


@pytest.mark.slow
def test_tokenizing_is_as_fast_as_the_library_alone(tmp_path: Path, shared: Callable[[str], Path]) -> None:
    """95% of it. In processor time, and by the best of many short turns, which other processes slow down least.

    The library alone is given all pieces in memory, in batches of the same size, and its ids are never looked at. On a
    busy machine even the best of 12 turns differ by some percent, so there it takes more turns. What is paid per token
    costs half.
    """
    path = corpus(tmp_path / "text.txt", shared, 300_000)
    tokenizer = TextTokenizer.open(str(shared("qwen2.5-tokenizer")))
    documents = open_documents([path])
    texts = list(pieces(documents[0], True))

    def alone() -> None:
        for at in range(0, len(texts), 8):
            tokenizer.encoder.encode_batch_fast(texts[at : at + 8], add_special_tokens=False)

    def whole() -> None:
        for _ in tokenized(TextWork(documents, tokenizer)):
            pass

    seconds: dict[Callable[[], None], list[float]] = {alone: [], whole: []}

    def ratio() -> float:
        return min(seconds[alone]) / min(seconds[whole])

    for turn in range(60):
        if turn >= 12 and ratio() >= 0.95:
            break
        for work, taken in seconds.items():
            start = time.process_time()
            work()
            taken.append(time.process_time() - start)
    assert ratio() >= 0.95, seconds.values()


MEMORY = """
import sys
from llmq.hardware.host_memory import peak_resident_bytes
from llmq.data.tokens.tokenize import tokenize_data
for path in sys.argv[2:]:
    tokenize_data(tokenizer=sys.argv[1], inputs=[path], out_dir=path + ".tokens")
    print(peak_resident_bytes() >> 20)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("txt", marks=pytest.mark.sweep), "jsonl"])
def test_memory_is_flat(tmp_path: Path, shared: Callable[[str], Path], small_tokenizer: Path, kind: str) -> None:
    """Four times the text takes 8 to 22 MiB more, as threads happen to meet; its tokens, where held, would be 40 more.

    With a tokenizer whose own cache of words is small.
    """
    paths = []
    for megabytes in (5, 20):
        path = corpus(tmp_path / f"{megabytes}.txt", shared, megabytes * 1_000_000)
        if kind == "jsonl":
            text = path.read_text()
            path = path.with_suffix(".jsonl")
            cut = (text[at : at + 20_000] for at in range(0, len(text), 20_000))
            path.write_text("".join(json.dumps({"text": part}) + "\n" for part in cut))
        paths.append(str(path))
    command = [sys.executable, "-c", MEMORY, str(small_tokenizer), *paths]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    few, many = map(int, done.stdout.split())
    assert many - few < 35, (few, many)
