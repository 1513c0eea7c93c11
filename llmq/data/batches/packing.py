"""Documents packed into rows, whole and apart: `Packs` are samples of several documents each.

A row is up to seq_len tokens of documents one after the other, then padding. Positions start from 0 in each document,
attention does not look across (both by the borders), and nothing is trained across: a document's last token, which is
its end token, has no target. The padding, tokens 0 that are not trained, continues the last document, which does not
see it. Documents longer than seq_len are cut into pieces, each a document of its own. A piece begins with the last
token of the one before, which had no target there: every token but a document's first is a target once.

With virtual tokens each document begins with as many positions that are 0 here and have no target, its last one among
them: the first token of a document is never trained.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from llmq.data.batches.first_fit import fewest_docs, pack
from llmq.data.batches.row_layout import RowForm
from llmq.data.batches.windows import FileSamples, Rows, aim, empty_rows
from llmq.data.rows.records import all_problems, noted
from llmq.data.tokens.sidecar import Sidecar
from llmq.data.tokens.token_file import TokenFile
from llmq.errors import DataError

READ_AT_ONCE = 1 << 22  # tokens held in memory while end tokens and masks are counted


@dataclass(frozen=True, eq=False)
class PackIndex:
    """The documents (pieces of long ones) in the order of the packs; `starts` count tokens through all files."""

    ends: np.ndarray  # (num_packs + 1,) int64: pack p has the documents ends[p] to ends[p + 1]
    starts: np.ndarray  # (num_documents,) int64: first token
    lengths: np.ndarray  # (num_documents,) int32: tokens

    @property
    def num_packs(self) -> int:
        return len(self.ends) - 1

    def spans(self, number: int) -> list[tuple[int, int]]:
        """First token of each document of a pack, and the one after its last."""
        mine = slice(*self.ends[number : number + 2].tolist())
        starts = self.starts[mine]
        return list(zip(starts.tolist(), (starts + self.lengths[mine]).tolist(), strict=True))


class Packs(FileSamples):
    """Packs of the documents of several token files, numbered through; the samples of packed training.

    With one document to a row this is plain padding, and rows have no borders.
    """

    def __init__(self, files: Sequence[TokenFile], form: RowForm) -> None:
        """Raises DataError if a file does not say where its documents end, or for a foreign id (see FileSamples)."""
        documents = document_lengths(files)
        super().__init__(files, with_docs(form, sizes_in_rows(documents, form)))
        self.index = pack_documents(documents, self.form)
        self.num_windows = self.index.num_packs
        self.longest = int(self.index.lengths.max(initial=1)) + self.num_virtual  # tokens of a document in a row
        self.limits = self.form.limits(self.longest)

    @property
    def fill(self) -> float:
        """Share of the rows that is documents; the rest is padding."""
        return int(self.index.lengths.sum(dtype=np.int64)) / max(self.num_windows * self.seq_len, 1)

    @cached_property
    def num_trained(self) -> int:
        """Tokens of an epoch that are trained. Reads the masks, if there are any."""
        documents = document_lengths(self.token_files)
        starts = np.cumsum(documents) - documents
        total = self.num_tokens - len(starts)
        for file, first in zip(self.token_files, self.file_starts[:-1].tolist(), strict=True):
            for at in range(0, file.num_tokens if file.mask_bits is not None else 0, READ_AT_ONCE):
                stop = min(at + READ_AT_ONCE, file.num_tokens)
                excluded = ~file.trained(at, stop)
                low, high = np.searchsorted(starts, (first + at, first + stop))
                total -= int(excluded.sum()) - int(excluded[starts[low:high] - first - at].sum())
        return total

    def read(self, samples: np.ndarray) -> Rows:
        """The packs with the numbers `samples` (n,). Targets that the files' masks exclude are -100."""
        rows = empty_rows(len(samples), self.seq_len, self.form.docs)
        for row, sample in enumerate(np.asarray(samples).tolist()):
            lay(rows, row, itertools.starmap(self._document, self.index.spans(sample)), self.num_virtual)
        return rows if self.limits else rows._replace(borders=None)

    def _document(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | bool]:
        number = int(np.searchsorted(self.file_starts, start, side="right")) - 1
        before = int(self.file_starts[number])
        return self.part(number, start - before, stop - before)


def with_docs(form: RowForm, sizes: np.ndarray) -> RowForm:
    """A form with the documents of a row: where it leaves them open, as few as fill rows nearly as well as any number
    would (`fewest_docs`) with documents that take these `sizes` (n,) of them."""
    return replace(form, max_docs=form.docs or fewest_docs(sizes, form.seq_len))


def sizes_in_rows(documents: np.ndarray, form: RowForm) -> np.ndarray:
    """What each piece (n,) int32 of documents of these lengths takes of a row, virtual tokens included."""
    return piece_lengths(documents, form.room) + np.int32(form.num_virtual)


def pack_documents(documents: np.ndarray, form: RowForm) -> PackIndex:
    """Which pieces lie in which pack, of documents of these lengths (n,) int64 that follow each other without a gap."""
    assert form.docs is not None
    pieces = piece_lengths(documents, form.room)
    numbers, num_packs = pack(pieces + np.int32(form.num_virtual), form.seq_len, form.docs, form.seed)
    order = np.argsort(numbers, kind="stable")
    ends = np.concatenate([[0], np.cumsum(np.bincount(numbers, minlength=num_packs))])
    # Each cut is a token that two pieces have.
    cuts = np.repeat(np.arange(len(documents)), piece_counts(documents, form.room))
    starts = np.cumsum(pieces, dtype=np.int64) - pieces - (np.arange(len(pieces)) - cuts)
    return PackIndex(ends, starts[order], pieces[order])


def lay(rows: Rows, row: int, documents: Iterable[tuple[np.ndarray, Any]], num_virtual: int = 0) -> None:
    """Writes documents into one of `rows`, one after the other, each after the positions of its virtual tokens; what is
    left of it stays as it is.

    A document is its ids (n,) and which but the first of them are trained, (n - 1,) bool or True.
    """
    assert rows.borders is not None
    tokens, targets, borders, at = rows.tokens[row], rows.targets[row], rows.borders[row], 0
    for number, (ids, trained) in enumerate(documents):
        start = at + num_virtual
        stop = start + len(ids)
        tokens[start:stop] = ids
        aim(targets[start : stop - 1], ids, trained)
        borders[number] = at
        at = stop


def document_lengths(files: Sequence[TokenFile]) -> np.ndarray:
    """Tokens (n,) int64 of each document of all files, in order. DataError names every file that does not say."""
    lengths = [np.empty(0, np.int64)]
    with all_problems() as problems:
        for file in files:
            with noted(problems):
                lengths.append(np.diff(_document_starts(file)))
    return np.concatenate(lengths)


def piece_lengths(documents: np.ndarray, seq_len: int) -> np.ndarray:
    """Tokens (n,) int32 of each piece of at most seq_len tokens of the documents, in order."""
    counts = piece_counts(documents, seq_len)
    pieces = np.full(int(counts.sum()), seq_len, np.int32)
    pieces[np.cumsum(counts) - 1] = documents - (counts - 1) * (seq_len - 1)
    return pieces


def piece_counts(documents: np.ndarray, seq_len: int) -> np.ndarray:
    """How many pieces (n,) int64 each document has: two that follow each other share a token."""
    return np.maximum(-(-(documents - 1) // (seq_len - 1)), 1)


def _document_starts(file: TokenFile) -> np.ndarray:
    """(num_documents + 1,) int64: the first token of each document, then the end of the file.

    A file that does not count its documents itself (version 1 or 2, or one document where its sidecar counts several)
    is cut after each end token of its tokenizer.
    """
    sidecar = Sidecar.read(file.path, file.num_tokens)
    uncounted = file.num_documents == 1 and sidecar is not None and sidecar.num_documents > 1
    if file.header.version >= 3 and not uncounted:
        return file.document_starts
    if sidecar is None:
        raise DataError(
            f"{file.path} is of version {file.header.version}, which does not say where documents end, and no sidecar "
            "names their end token: make it again with tokenize-data, or leave out --packing and --no-packing"
        )
    found = [np.zeros(1, np.int64)]
    for at in range(0, file.num_tokens, READ_AT_ONCE):
        ids = file.tokens[at : at + READ_AT_ONCE]
        found.append(np.flatnonzero(ids == sidecar.tokenizer.eos_token_id) + at + 1)
    starts = np.concatenate(found)
    return starts if starts[-1] == file.num_tokens else np.append(starts, file.num_tokens)
