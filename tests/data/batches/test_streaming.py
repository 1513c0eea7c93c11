"""`--streaming` on files of rows: going on from any row of any file, in slices and shares."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq.data.batches.row_layout import PACKED, PADDED, RowLayout
from llmq.data.batches.stream import PackedStream, Stream
from llmq.data.batches.streaming import open_stream
from llmq.data.chat.encode import EncodeOptions
from llmq.data.rows.file_rows import FileRows, HeldShare, LocalFile
from llmq.data.rows.request import Request
from llmq.data.rows.row_files import RowFile
from llmq.data.rows.sources import Found
from llmq.data.tokens.tokenizer import TextTokenizer

T = 8


def stream_of(
    folder: Path,
    tokenizer: Path,
    options: EncodeOptions | None = None,
    layout: RowLayout | None = None,
    **part: Any,
) -> Stream:
    """A part of three files of 40 rows."""
    files = []
    for number in range(3):
        path = folder / f"{number}.jsonl"
        path.write_text(
            "".join(json.dumps({"text": f"{number} {row} say" * (row % 4 + 1)}) + "\n" for row in range(40))
        )
        file = RowFile.of(path)
        assert file is not None
        files.append(LocalFile(file))
    opened = TextTokenizer.open(str(tokenizer))
    found = Found("rows", ("rows",), FileRows(tuple(files), **part), None, "all")
    request = Request(found, opened, options or EncodeOptions())
    return open_stream(request, T, opened.vocab_size, lambda text: None, layout=layout)


@pytest.mark.parametrize(
    "part",
    [
        {"start": 13, "stop": 97},
        {"start": 50},
        {"share": HeldShare(Fraction(1, 3), False), "start": 5, "stop": 110},
        {},
    ],
)
def test_it_goes_on_in_every_file_of_a_slice(tmp_path: Path, small_tokenizer: Path, part: dict[str, Any]) -> None:
    stream = stream_of(tmp_path, small_tokenizer, **part)
    rows = stream.rows()
    whole = []
    while not whole or whole[-1].state["epoch"] < 2:
        whole.append(next(rows))
    assert {row.state["shard"] for row in whole} >= {1, 2}
    for at in range(0, len(whole) - 30, 7):
        again = stream.rows(whole[at].state)
        for row in whole[at + 1 : at + 31]:
            got = next(again)
            np.testing.assert_array_equal(got.tokens, row.tokens)
            np.testing.assert_array_equal(got.targets, row.targets)
            assert got.state == row.state


def test_a_row_that_becomes_several_documents_is_packed_as_several(tmp_path: Path, small_tokenizer: Path) -> None:
    """What was split is not one again, as it is in windows."""
    options = EncodeOptions(overlong="split", seq_len=T)
    stream = stream_of(tmp_path, small_tokenizer, options=options, layout=RowLayout(PACKED))
    for document in islice(stream.open_at(0, 0, 0, 0), 20):
        whole, rest = divmod(len(document.ids), T)
        assert document.lengths == (T,) * whole + (rest,) * (rest > 0)
    rows = [row for row in islice(stream.rows(), 400) if row.state["epoch"] == 0]
    assert isinstance(stream, PackedStream) and stream.limits == (stream.max_docs, T)
    borders = np.stack([row.borders for row in rows if row.borders is not None])
    lengths = np.diff(borders, axis=1)
    assert len(borders) == len(rows) > 100 and (lengths == T).any() and stream.max_docs == (lengths > 0).sum(1).max()


@pytest.mark.parametrize(("layout", "max_docs", "docs"), [(PACKED, None, 4), (PACKED, 2, 2), (PADDED, None, 1)])
def test_the_documents_of_a_row_are_known_from_the_first_rows(
    tmp_path: Path, small_tokenizer: Path, layout: str, max_docs: int | None, docs: int
) -> None:
    """Few as they are, they tell how many fit into a long row."""
    path = tmp_path / "short.jsonl"
    path.write_text('{"input_ids": [5, 6, 7]}\n' * 2000)
    file = RowFile.of(path)
    assert file is not None
    tokenizer = TextTokenizer.open(str(small_tokenizer))
    found = Found("rows", ("rows",), FileRows((LocalFile(file),)), None, "all")
    request = Request(found, tokenizer, EncodeOptions())
    sizes = {"layout": RowLayout(layout), "max_docs": max_docs}
    stream = open_stream(request, 12, tokenizer.vocab_size, lambda text: None, **sizes)  # type: ignore[arg-type]
    assert isinstance(stream, PackedStream) and stream.max_docs == docs
    stream = open_stream(request, 1200, tokenizer.vocab_size, lambda text: None, **sizes)  # type: ignore[arg-type]
    assert isinstance(stream, PackedStream) and stream.max_docs == {4: 400}.get(docs, docs)


def test_two_streams_have_two_keys(tmp_path: Path, small_tokenizer: Path) -> None:
    one, same, other = (stream_of(tmp_path, small_tokenizer, start=start) for start in (3, 3, 4))
    assert one.key == same.key != other.key
