"""`--streaming`: rows of data that are read, tokenized and trained in one go, and no token file is kept.

There is no table of them, so nothing is permuted: rows are trained in the order of the stream, and the stream should be
shuffled where it is stored. A data set of the Hub is downloaded file by file, each only for as long as it is read. What
a run needs to resume is where its next row begins: which pass, shard, row, and token; and when it was begun, for
templates that write the date.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import NamedTuple

import numpy as np

from llmq.data.batches.packing import lay, pack_documents, repeated, sizes_in_rows, with_docs
from llmq.data.batches.permutation import mixed
from llmq.data.batches.rows import WINDOWS, RowForm, Rows, RowSource, aim, empty_rows
from llmq.data.chat.encoded import Counts, notes
from llmq.data.rows.file_rows import FileRows
from llmq.data.rows.find_sources import Request
from llmq.data.rows.row_files import BadRows
from llmq.data.stream import START, Position, Stream
from llmq.data.tokens.pipeline import RowTokens, RowWork, tokenized
from llmq.data.tokens.tokenize import Say
from llmq.data.tokens.tokenizer import TemplateNote
from llmq.errors import DataError, UsageError

Place = dict[str, int]
PLACE = ("epoch", "shard", "row", "overall", "token")  # where a row begins
GROUP_TOKENS = 1 << 18  # packed together: the last row of a group may be hardly filled
GROUP_ROWS = 16  # at least
ROWS_AT_ONCE = 64  # tokenized together: few, so that training begins soon


class StreamedRows(RowSource):
    """Documents as rows of a form, without end: after the last document comes the first again.

    `documents(begun)` is a stream of what became of the rows of the data, the same each time; its positions are those
    of FileRows, whose files are shards here. `key` names what it depends on, beside `begun` (seconds since 1970);
    `ends` are the tokens that end documents and trained turns, as far as known.

    Rows are windows, in which documents follow each other without a border, or they are packed, whole and apart as in
    Packs, a group of consecutive documents at a time; with one document to a row, they are padded. A group ends with a
    row of the data, after GROUP_TOKENS (or GROUP_ROWS rows of as many tokens) or with a pass.
    """

    num_windows = None  # not known ahead

    def __init__(
        self,
        documents: Callable[[int], Stream[RowTokens]],
        form: RowForm,
        name: str,
        key: str = "",
        ends: Iterable[int] = (),
        template: TemplateNote | None = None,
    ) -> None:
        super().__init__(form)
        self.documents, self.name, self.key, self.template = documents, name, key, template
        self.ends, self.limits = frozenset(ends), form.limits()

    @property
    def end_token_ids(self) -> set[int]:
        """Those that it was made with."""
        return set(self.ends)

    def templates(self) -> list[tuple[TemplateNote, float]]:
        """The chat template that renders it, if there is one."""
        return [] if self.template is None else [(self.template, 1.0)]

    def read(self, position: Position = START) -> Iterator[tuple[Place, Rows]]:
        """Row after row (1,T), each with the position after it.

        A position is the whole numbers `begun` and PLACE, and for packed rows `packs`, how many of the group at this
        place were taken. DataError for an id outside the vocabulary, or if a whole pass has no tokens.
        """
        at = dict(position) if position else {"begun": int(time.time()), **dict.fromkeys(PLACE, 0)}
        return self._windows(at) if self.form.kind == WINDOWS else self._packs(at)

    def _windows(self, at: Place) -> Iterator[tuple[Place, Rows]]:
        pieces, waiting, count, size = self._pieces(at), deque[_Piece](), 0, self.form.room
        while True:
            while count <= size:
                waiting.append(next(pieces))
                count += len(waiting[-1].ids)
            ids = np.concatenate([piece.ids for piece in waiting])[: size + 1]
            trained = np.concatenate([piece.trained for piece in waiting])[: size + 1]
            rest = size
            while len(waiting[0].ids) <= rest:
                rest -= len(waiting.popleft().ids)
            waiting[0] = waiting[0].after(rest)
            count -= size
            row = empty_rows(1, self.seq_len, None)
            row.tokens[0, self.num_virtual :] = ids[:-1]
            aim(row.targets[0, self.num_virtual :], ids, trained[1:])
            yield waiting[0].place, row

    def _packs(self, at: Place) -> Iterator[tuple[Place, Rows]]:
        taken = at.get("packs", 0)
        for group, following in self._groups(at):
            place = group[0].place
            ids, trained = (np.concatenate(parts) for parts in zip(*((p.ids, p.trained) for p in group), strict=True))
            lengths = np.array([length for piece in group for length in piece.lengths], np.int64)
            seed = mixed(self.form.seed, place["epoch"], place["overall"])
            index = pack_documents(lengths, replace(self.form, seed=seed))
            for number in range(taken, index.num_packs):
                row = empty_rows(1, self.seq_len, self.form.docs)
                spans = ((ids[a:b], trained[a + 1 : b]) for a, b in index.spans(number))
                lay(row, 0, spans, self.num_virtual)
                is_last = number + 1 == index.num_packs
                after = {**following, "packs": 0} if is_last else {**place, "packs": number + 1}
                yield after, row if self.limits else row._replace(borders=None)
            taken = 0

    def _groups(self, at: Place) -> Iterator[tuple[list[_Piece], Place]]:
        """What is packed together, and the place of what follows."""
        group: list[_Piece] = []
        count, enough = 0, max(GROUP_TOKENS, GROUP_ROWS * self.seq_len)
        for piece in self._pieces(at):
            if group and (count >= enough or piece.place["epoch"] != group[0].place["epoch"]):
                yield group, piece.place
                group, count = [], 0
            group.append(piece)
            count += len(piece.ids)

    def _pieces(self, at: Place) -> Iterator[_Piece]:
        """Documents from a place on, pass after pass."""
        documents, epoch, skipped = self.documents(at["begun"]), at["epoch"], at["token"]
        start: Position = (at["shard"], at["row"], at["overall"])
        empty = False
        while True:
            for (shard, after, after_all), row in documents.read(start):
                ids = row.ids
                if ids.size and not 0 <= ids.min() <= ids.max() < self.form.vocab_size:
                    raise DataError(
                        f"{self.name}, shard {shard}, row {after}: an id is outside the vocabulary "
                        f"(0 to {self.form.vocab_size - 1}): tokenize the text with the model's own tokenizer"
                    )
                trained = np.ones(ids.size, bool) if row.trained is None else row.trained
                place = dict(zip(PLACE, (epoch, shard, after - 1, after_all - 1, 0), strict=True))
                piece = _Piece({"begun": at["begun"], **place}, ids, trained, row.lengths).after(skipped)
                skipped = 0
                if piece.ids.size:
                    empty = False
                    yield piece
            if empty:
                raise DataError(f"{self.name} has no tokens: check where it comes from")
            epoch, empty, start = epoch + 1, True, START


class _Piece(NamedTuple):
    """The tokens of a row of the data from one of them on, which is at `place`."""

    place: Place
    ids: np.ndarray
    trained: np.ndarray
    lengths: tuple[int, ...]  # of the whole row's documents

    def after(self, count: int) -> _Piece:
        place = {**self.place, "token": self.place["token"] + count}
        return self._replace(place=place, ids=self.ids[count:], trained=self.trained[count:])


def open_stream(request: Request, form: RowForm, say: Say) -> StreamedRows:
    """The rows of a request as an endless stream of rows of this form.

    Where rows are too long, that is reported when the first one is, and with all else at the end of the first pass.
    Packed rows that leave it open have as many documents as fill rows with documents such as the first ones. UsageError
    for text files, mixtures and drawn rows.
    """
    rows, name = request.found.train, request.found.name
    if not isinstance(rows, FileRows) or request.found.limit is not None or request.found.eval_tokens:
        raise UsageError(
            f"--streaming reads files of rows one after the other, which {name} is not: leave it out, or name the "
            "files or the data set of the Hub itself (such as HuggingFaceFW/fineweb:sample-10BT)"
        )
    first = request.encoder()
    assert first is not None
    say(f"{name}: a stream; {request.found.rule}\n{first.describe()}")
    first.encode(request.first_rows, [])  # which tokens end its trained turns
    said: set[str] = set()

    def report(when: str, counts: Counts, num_bad: int) -> None:
        if when not in said:
            said.add(when)
            for note in notes(counts, request.encode.seq_len, request.encode.overlong, num_bad):
                say(f"{name}, {when}: {note}")

    if form.kind != WINDOWS and form.docs is None:
        form = _with_docs(request, form)
    documents = partial(_Tokenized, request, rows, report)
    return StreamedRows(documents, form, name, request.key, first.end_token_ids, first.template_note)


def _with_docs(request: Request, form: RowForm) -> RowForm:
    """The form with the documents of a row by the first rows; the same on every day, as a run resumes with no other."""
    encoder = request.encoder(datetime.fromtimestamp(0))
    assert encoder is not None
    documents = np.array([len(document.ids) for document in encoder.encode(request.first_rows, [])], np.int64)
    return with_docs(form, repeated(sizes_in_rows(documents, form), form.seq_len))


@dataclass(frozen=True, eq=False)
class _Tokenized:
    """What becomes of a request's rows, as a stream; templates see the time `begun`."""

    request: Request
    rows: FileRows
    report: Callable[[str, Counts, int], None]
    begun: int  # seconds since 1970

    def read(self, position: Position = START) -> Iterator[tuple[Position, RowTokens]]:
        encoder = self.request.encoder(datetime.fromtimestamp(self.begun))
        assert encoder is not None
        left_out, counts = BadRows(self.request.skip_bad_rows), Counts()
        with closing(tokenized(RowWork(self.rows, encoder, ROWS_AT_ONCE), position)) as batches:
            for _, batch in batches:
                for one in batch.bad:
                    left_out.add(one)
                counts.add(batch.counts)
                if counts.overlong:
                    self.report("so far", counts, left_out.count)
                yield from batch.by_row()
        self.report("to the end of its rows", counts, left_out.count)
