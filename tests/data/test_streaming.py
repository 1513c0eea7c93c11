"""`--streaming` on files of rows: going on from any row of any file, in slices and shares."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq.data.encode import EncodeOptions
from llmq.data.request import Request
from llmq.data.row_files import RowFile
from llmq.data.rows import FileRows, LocalFile, Share
from llmq.data.sources import Found
from llmq.data.stream import Stream
from llmq.data.streaming import open_stream
from llmq.data.tokenizer import TextTokenizer

T = 8


def stream_of(folder: Path, tokenizer: Path, **part: Any) -> Stream:
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
    return open_stream(Request(found, opened, EncodeOptions()), T, opened.vocab_size, lambda text: None)


@pytest.mark.parametrize(
    "part",
    [{"start": 13, "stop": 97}, {"start": 50}, {"share": Share(Fraction(1, 3), False), "start": 5, "stop": 110}, {}],
)
def test_it_goes_on_in_every_file_of_a_slice(tmp_path: Path, small_tokenizer: Path, part: dict[str, Any]) -> None:
    stream = stream_of(tmp_path, small_tokenizer, **part)
    rows = stream.rows()
    whole = []
    while not whole or whole[-1][2]["epoch"] < 2:
        whole.append(next(rows))
    assert {state["shard"] for _, _, state in whole} >= {1, 2}
    for at in range(0, len(whole) - 30, 7):
        again = stream.rows(whole[at][2])
        for ids, targets, state in whole[at + 1 : at + 31]:
            got = next(again)
            np.testing.assert_array_equal(got[0], ids)
            np.testing.assert_array_equal(got[1], targets)
            assert got[2] == state


def test_two_streams_have_two_keys(tmp_path: Path, small_tokenizer: Path) -> None:
    one, same, other = (stream_of(tmp_path, small_tokenizer, start=start) for start in (3, 3, 4))
    assert one.key == same.key != other.key
