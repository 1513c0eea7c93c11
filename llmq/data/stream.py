"""Windows of documents that come one after the other and are not all there: larger than the disk, or still arriving.

There is no table of them, so nothing is permuted: rows are trained in the order of the stream, and the stream should be
shuffled where it is stored. What a run needs to go on is where its next row begins: which pass, shard, row, and token;
and when it was begun, for templates that write the date.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmq.data.token_file import TokenFile
from llmq.errors import DataError
from llmq.tensor import IGNORED

PLACE = ("epoch", "shard", "row", "overall", "token")  # where a row begins


class StreamedDocument(NamedTuple):
    """A document with its end token, and where it is: row `row` of shard `shard`, row `overall` of all, from 0."""

    shard: int
    row: int
    overall: int
    ids: np.ndarray  # (n,) int
    trained: np.ndarray | None  # (n,) bool, as targets; None: all


@dataclass(frozen=True, eq=False)
class Stream:
    """Documents as rows of `seq_len` tokens, without end: after the last document comes the first again.

    `open_at(begun, shard, row, overall)` yields the documents from that row of that shard on, which is row `overall` of
    all, up to the last of the last shard, the same each time; `key` names what these depend on, beside `begun` (seconds
    since 1970). Documents follow each other without a border, and the next row begins where one ends, as in Windows.
    """

    open_at: Callable[[int, int, int, int], Iterator[StreamedDocument]]
    seq_len: int
    vocab_size: int
    name: str
    key: str = ""
    end_token_ids: tuple[int, ...] = ()
    num_windows: None = None  # not known ahead
    limits: None = None  # rows have no borders
    num_tokens: int = 0  # that are there at the start
    token_files: tuple[TokenFile, ...] = ()
    files: list[tuple[Path, int]] = field(default_factory=list)

    def rows(self, state: Mapping[str, Any] | None = None) -> Iterator[tuple[np.ndarray, np.ndarray, dict[str, int]]]:
        """Tokens and targets, (seq_len,) int32 each, row after row, with the state behind the row.

        `state` is one that was yielded, or None for the start; it has the whole numbers `begun`, `epoch`, `shard`,
        `row`, `overall` and `token`. DataError for an id outside the vocabulary, or if a whole pass has no tokens.
        """
        at = dict(state) if state else {"begun": int(time.time()), **dict.fromkeys(PLACE, 0)}
        waiting: deque[_Piece] = deque()
        pieces = self._pieces(at)
        count = 0
        while True:
            while count <= self.seq_len:
                waiting.append(next(pieces))
                count += len(waiting[-1].ids)
            ids = np.concatenate([piece.ids for piece in waiting])[: self.seq_len + 1]
            trained = np.concatenate([piece.trained for piece in waiting])[: self.seq_len + 1]
            targets = np.where(trained, ids, IGNORED)[1:].astype(np.int32)
            rest = self.seq_len
            while len(waiting[0].ids) <= rest:
                rest -= len(waiting.popleft().ids)
            waiting[0] = waiting[0].behind(rest)
            count -= self.seq_len
            yield ids[:-1], targets, waiting[0].place()

    def _pieces(self, at: Mapping[str, int]) -> Iterator[_Piece]:
        """Documents from a place on, pass after pass."""
        begun, epoch, skipped = at["begun"], at["epoch"], at["token"]
        documents = self.open_at(begun, at["shard"], at["row"], at["overall"])
        empty = False
        while True:
            for document in documents:
                ids = np.asarray(document.ids)
                if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
                    raise DataError(
                        f"{self.name}, shard {document.shard}, row {document.row + 1}: an id is outside the vocabulary "
                        f"(0 to {self.vocab_size - 1}): tokenize the text with the model's own tokenizer"
                    )
                trained = np.ones(ids.size, bool) if document.trained is None else np.asarray(document.trained, bool)
                places = (document.shard, document.row, document.overall)
                place = {"begun": begun, "epoch": epoch, **dict(zip(("shard", "row", "overall"), places, strict=True))}
                piece = _Piece(place, 0, ids.astype(np.int32), trained).behind(skipped)
                skipped = 0
                if piece.ids.size:
                    empty = False
                    yield piece
            if empty:
                raise DataError(f"{self.name} has no tokens: check where it comes from")
            epoch, empty, documents = epoch + 1, True, self.open_at(begun, 0, 0, 0)


class _Piece(NamedTuple):
    """The tokens of a document from number `token` on."""

    document: dict[str, int]
    token: int
    ids: np.ndarray
    trained: np.ndarray

    def behind(self, count: int) -> _Piece:
        return self._replace(token=self.token + count, ids=self.ids[count:], trained=self.trained[count:])

    def place(self) -> dict[str, int]:
        return {**self.document, "token": self.token}
