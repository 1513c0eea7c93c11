"""Rows of documents that come one after the other and are not all there: larger than the disk, or still arriving.

There is no table of them, so nothing is permuted: rows are trained in the order of the stream, and the stream should be
shuffled where it is stored. What a run needs to go on is where its next row begins: which pass, shard, row, and token;
and when it was begun, for templates that write the date.

A `Stream` cuts windows. A `PackedStream` packs a group of consecutive documents at a time, in memory, and goes on from
the beginning of the group that it was in, less the rows that were taken from it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmq.data.batches.packing import lay, pack_documents
from llmq.data.batches.permutation import mixed
from llmq.data.tokens.sidecar import TemplateNote
from llmq.data.tokens.token_file import TokenFile
from llmq.errors import DataError
from llmq.tensor import IGNORED

PLACE = ("epoch", "shard", "row", "overall", "token")  # where a row begins
GROUP_TOKENS = 1 << 18  # packed together: the last row of a group may be hardly filled
GROUP_ROWS = 16  # at least


class StreamedDocument(NamedTuple):
    """What became of one row, and where that is: row `row` of shard `shard`, row `overall` of all, from 0."""

    shard: int
    row: int
    overall: int
    ids: np.ndarray  # (n,) int; each document with its end token
    trained: np.ndarray | None  # (n,) bool, as targets; None: all
    lengths: tuple[int, ...] | None = None  # of the documents, where it is several


class StreamedRow(NamedTuple):
    """A row to train on."""

    tokens: np.ndarray  # (T,) int32
    targets: np.ndarray  # (T,) int32; -100 is not trained
    borders: np.ndarray | None  # (D+1,) int32: starts of the documents, ascending, then T repeated; None: not packed
    state: dict[str, int]  # of the stream behind this row


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
    chat_template: TemplateNote | None = None
    num_windows: None = None  # not known ahead
    num_tokens: int = 0  # that are there at the start
    token_files: tuple[TokenFile, ...] = ()
    files: list[tuple[Path, int]] = field(default_factory=list)

    @property
    def limits(self) -> tuple[int, int] | None:
        """None: rows have no borders."""
        return None

    def rows(self, state: Mapping[str, Any] | None = None) -> Iterator[StreamedRow]:
        """Row after row, with the state behind it.

        `state` is one that was yielded, or None for the start; it has the whole numbers `begun`, `epoch`, `shard`,
        `row`, `overall` and `token`. DataError for an id outside the vocabulary, or if a whole pass has no tokens.
        """
        waiting: deque[_Piece] = deque()
        pieces = self._pieces(_begun(state))
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
            yield StreamedRow(ids[:-1], targets, None, waiting[0].place())

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
                piece = _Piece(place, 0, ids.astype(np.int32), trained, document.lengths).behind(skipped)
                skipped = 0
                if piece.ids.size:
                    empty = False
                    yield piece
            if empty:
                raise DataError(f"{self.name} has no tokens: check where it comes from")
            epoch, empty, documents = epoch + 1, True, self.open_at(begun, 0, 0, 0)


@dataclass(frozen=True, eq=False)
class PackedStream(Stream):
    """Documents packed into rows, whole and apart as in Packs, at most `max_docs` to a row; with 1, rows are padded.

    A group ends with a row of the data, after GROUP_TOKENS (or GROUP_ROWS rows of as many tokens) or with a pass.
    """

    max_docs: int = 1
    seed: int = 0

    @property
    def limits(self) -> tuple[int, int] | None:
        """Most documents of a row, and tokens of the longest; None where there is one to a row, and no borders."""
        return (self.max_docs, self.seq_len) if self.max_docs > 1 else None

    def rows(self, state: Mapping[str, Any] | None = None) -> Iterator[StreamedRow]:
        """As of a Stream; the state also has `packs`, how many rows of the group at this place were taken."""
        at = _begun(state)
        taken = at.get("packs", 0)
        for group, following in self._groups(at):
            place = group[0].place()
            ids, trained = (np.concatenate(parts) for parts in zip(*((p.ids, p.trained) for p in group), strict=True))
            documents = [length for piece in group for length in piece.lengths or (len(piece.ids),)]
            seed = mixed(self.seed, place["epoch"], place["overall"])
            index = pack_documents(np.array(documents, np.int64), self.seq_len, self.max_docs, seed)
            for number in range(taken, index.num_packs):
                tokens, targets = np.zeros(self.seq_len, np.int32), np.full(self.seq_len, IGNORED, np.int32)
                borders = np.full(self.max_docs + 1, self.seq_len, np.int32)
                spans = [slice(start, start + length) for start, length in zip(*index.pack(number), strict=True)]
                lay(tokens, targets, borders, ((ids[span], trained[span][1:]) for span in spans))
                is_last = number + 1 == index.num_packs
                behind = {**following, "packs": 0} if is_last else {**place, "packs": number + 1}
                yield StreamedRow(tokens, targets, borders if self.limits else None, behind)
            taken = 0

    def _groups(self, at: Mapping[str, int]) -> Iterator[tuple[list[_Piece], dict[str, int]]]:
        """What is packed together, and the place of what follows."""
        group: list[_Piece] = []
        count, enough = 0, max(GROUP_TOKENS, GROUP_ROWS * self.seq_len)
        for piece in self._pieces(at):
            if group and (count >= enough or piece.document["epoch"] != group[0].document["epoch"]):
                yield group, piece.place()
                group, count = [], 0
            group.append(piece)
            count += len(piece.ids)


def _begun(state: Mapping[str, int] | None) -> dict[str, int]:
    """Where to go on; None: the start, now."""
    return dict(state) if state else {"begun": int(time.time()), **dict.fromkeys(PLACE, 0)}


class _Piece(NamedTuple):
    """The tokens of a document from number `token` on."""

    document: dict[str, int]
    token: int
    ids: np.ndarray
    trained: np.ndarray
    lengths: tuple[int, ...] | None  # of the whole row's documents

    def behind(self, count: int) -> _Piece:
        return self._replace(token=self.token + count, ids=self.ids[count:], trained=self.trained[count:])

    def place(self) -> dict[str, int]:
        return {**self.document, "token": self.token}
