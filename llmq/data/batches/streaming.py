"""`--streaming`: rows are read, tokenized and trained in one go, and no token file is kept.

A data set of the Hub is downloaded file by file, each only for as long as it is read. A run goes on from any row,
because the stream's state names it (llmq/data/batches/stream.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from llmq.data.batches.first_fit import fewest_docs, repeated
from llmq.data.batches.packing import piece_lengths
from llmq.data.batches.row_layout import PADDED, WINDOWS, RowLayout
from llmq.data.batches.stream import PackedStream, Stream, StreamedDocument
from llmq.data.chat.counts import Counts, notes
from llmq.data.chat.encode import ChatEncoder, Encoded, Encoder
from llmq.data.chat.template import template_note
from llmq.data.rows.file_rows import START, FileRows, Position
from llmq.data.rows.records import BadRow, BadRows, Record
from llmq.data.rows.request import Request
from llmq.data.tokens.pipeline import tokenized
from llmq.data.tokens.tokenize import Say
from llmq.errors import UsageError

ROWS_AT_ONCE = 64  # few, so that training begins soon


@dataclass(frozen=True, eq=False)
class _Batch:
    rows: list[tuple[Position, Record | BadRow]]  # the position behind each row


@dataclass(frozen=True, eq=False)
class _Encoded:
    documents: list[StreamedDocument]
    bad: list[BadRow]
    counts: Counts


@dataclass(frozen=True, eq=False)
class StreamWork:
    """Rows as documents that know their place."""

    rows: FileRows
    encoder: Encoder

    def batches(self, position: Position = START) -> Iterator[_Batch]:
        """ROWS_AT_ONCE rows at a time."""
        batch: list[tuple[Position, Record | BadRow]] = []
        for item in self.rows.read(position):
            batch.append(item)
            if len(batch) == ROWS_AT_ONCE:
                yield _Batch(batch)
                batch = []
        if batch:
            yield _Batch(batch)

    def encode(self, batch: _Batch) -> _Encoded:
        """What became of each row that can be used, with the lengths of its documents."""
        encoder = self.encoder.copied()
        bad = [row for _, row in batch.rows if isinstance(row, BadRow)]
        parts: dict[str, list[Encoded]] = {}
        for document in encoder.encode([row for _, row in batch.rows if isinstance(row, Record)], bad):
            parts.setdefault(document.place, []).append(document)
        documents = []
        for (shard, behind, behind_all), row in batch.rows:
            if mine := parts.get(row.place):
                ids = np.concatenate([part.ids for part in mine])
                masks = [np.ones(len(part.ids), bool) if part.trained is None else part.trained for part in mine]
                lengths = tuple(len(part.ids) for part in mine)
                place = (shard, behind - 1, behind_all - 1)
                documents.append(StreamedDocument(*place, ids, np.concatenate(masks), lengths))
        return _Encoded(documents, bad, encoder.counts)


def open_stream(
    request: Request,
    seq_len: int,
    vocab_size: int,
    say: Say,
    *,
    layout: RowLayout | None = None,
    max_docs: int | None = None,
    seed: int = 0,
) -> Stream:
    """The rows of a request as an endless stream of windows, or of packed or padded rows.

    Where rows are too long, that is said when the first one is, and with all else at the end of the first pass.
    `max_docs` to a packed row; None is as many as fill rows with documents such as the first ones. UsageError for text
    files, mixtures and drawn rows, and for a packed `seq_len` of 1.
    """
    rows, name = request.found.train, ", ".join(request.found.asked)
    if not isinstance(rows, FileRows) or request.found.limit is not None or request.found.eval_tokens:
        raise UsageError(
            f"--streaming reads files of rows one behind the other, which {name} is not: leave it out, or name the "
            "files or the data set of the Hub itself (such as HuggingFaceFW/fineweb:sample-10BT)"
        )
    looked_at = request.encoder()
    assert looked_at is not None
    say(f"{name}: a stream; {request.found.rule}\n{looked_at.describe()}")
    looked_at.encode(request.first_rows, [])  # which tokens end its trained turns

    said: set[str] = set()

    def tell(when: str, counts: Counts, num_bad: int) -> None:
        if when not in said:
            said.add(when)
            for note in notes(counts, request.encode.seq_len, request.encode.overlong, num_bad):
                say(f"{name}, {when}: {note}")

    def open_at(begun: int, shard: int, row: int, overall: int) -> Iterator[StreamedDocument]:
        encoder = request.encoder(datetime.fromtimestamp(begun))
        assert encoder is not None
        counted, counts = BadRows(request.skip_bad_rows), Counts()
        batches = tokenized(StreamWork(rows, encoder), (shard, row, overall))
        try:
            for batch in batches:
                for bad in batch.bad:
                    counted.add(bad)
                counts.add(batch.counts)
                if counts.overlong:
                    tell("so far", counts, counted.count)
                yield from batch.documents
            tell("to the end of its rows", counts, counted.count)
        finally:
            batches.close()

    template = template_note(looked_at.templates) if isinstance(looked_at, ChatEncoder) else None
    about = (open_at, seq_len, vocab_size, name, request.key, looked_at.end_token_ids, template)
    if layout is None or layout.kind == WINDOWS:
        return Stream(*about)
    docs = 1 if layout.kind == PADDED else max_docs or _docs_per_row(request, seq_len)
    return PackedStream(*about, max_docs=docs, seed=seed)


def _docs_per_row(request: Request, seq_len: int) -> int:
    """Most documents of a row, by the first rows; the same on every day, as a run goes on with no other number."""
    encoder = request.encoder(datetime.fromtimestamp(0))
    assert encoder is not None
    documents = np.array([len(document.ids) for document in encoder.encode(request.first_rows, [])], np.int64)
    return fewest_docs(repeated(piece_lengths(documents, seq_len), seq_len), seq_len)
