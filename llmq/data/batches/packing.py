"""Documents packed into rows, whole and apart: `Packs` are samples of several documents each.

A row is up to seq_len tokens of documents one after the other, then padding. Positions start anew with each document,
attention does not look across (both by the borders), and nothing is trained across: a document's last token, which is
its end token, has no target. The padding, tokens 0 that are not trained, continues the last document, which does not
see it. Documents longer than seq_len are cut into pieces, each a document of its own. A piece begins with the last
token of the one before, which had no target there: every token but a document's first is a target once.

What lies where is worked out once (first_fit.py) and kept in the cache, by all that it depends on: the lengths of the
documents, the sequence length, documents to a row, and the seed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmq.cache_folder import cache_folder
from llmq.data.batches.first_fit import fewest_docs, pack
from llmq.data.batches.windows import Rows, open_files, require_ids
from llmq.data.tokens.sidecar import Sidecar
from llmq.data.tokens.token_file import TokenFile
from llmq.disk import write_whole
from llmq.errors import DataError, UsageError
from llmq.tensor import IGNORED

READ_AT_ONCE = 1 << 22  # tokens held in memory while end tokens and masks are counted
MAGIC = b"llmq packs 3\n\0\0\0"  # counts up with every change of what is packed where
START, LENGTH = np.dtype("<i8"), np.dtype("<i4")


@dataclass(frozen=True, eq=False)
class PackIndex:
    """The documents (pieces of long ones) in the order of the packs; `starts` count tokens through all files."""

    ends: np.ndarray  # (num_packs + 1,) int64: pack p has the documents ends[p] to ends[p + 1]
    starts: np.ndarray  # (num_documents,) int64: first token
    lengths: np.ndarray  # (num_documents,) int32: tokens

    @property
    def num_packs(self) -> int:
        return len(self.ends) - 1

    def pack(self, number: int) -> tuple[list[int], list[int]]:
        """First tokens and lengths of the documents of a pack."""
        mine = slice(*self.ends[number : number + 2].tolist())
        return self.starts[mine].tolist(), self.lengths[mine].tolist()

    def to_bytes(self) -> bytes:
        """As kept in the cache: magic, SHA-256 of what follows, counts of packs and documents, the arrays."""
        counts = np.array([self.num_packs, len(self.starts)], START)
        parts = (counts, self.ends.astype(START), self.starts.astype(START), self.lengths.astype(LENGTH))
        body = b"".join(part.tobytes() for part in parts)
        return MAGIC + hashlib.sha256(body).digest() + body

    @classmethod
    def load(cls, path: Path) -> PackIndex | None:
        """The index in a file, mapped into memory; None if there is none, or it is not what was written."""
        try:
            raw = np.memmap(path, np.uint8, mode="r")
        except (OSError, ValueError):  # no such file, or an empty one
            return None
        head, counts_at = len(MAGIC) + 32, len(MAGIC) + 32 + 2 * START.itemsize
        if len(raw) < counts_at or raw[: len(MAGIC)].tobytes() != MAGIC:
            return None
        if hashlib.sha256(raw[head:].data).digest() != raw[len(MAGIC) : head].tobytes():
            return None
        num_packs, num_documents = raw[head:counts_at].view(START).tolist()
        starts_at = counts_at + (num_packs + 1) * START.itemsize
        lengths_at = starts_at + num_documents * START.itemsize
        parts = (raw[counts_at:starts_at].view(START), raw[starts_at:lengths_at].view(START))
        return cls(*parts, raw[lengths_at:].view(LENGTH))


class Packs:
    """Packs of the documents of several token files, numbered through; the samples of packed training.

    With one document to a row this is plain padding, and rows have no borders.
    """

    def __init__(
        self, files: Sequence[TokenFile], seq_len: int, vocab_size: int, seed: int, max_docs: int | None = None
    ) -> None:
        """`max_docs` to a row; None is as few as fill the rows nearly as well as any number (`fewest_docs`).

        Raises DataError if a file does not say where its documents end, or an id is found that is not below
        `vocab_size` (see require_ids), StorageError if the cache cannot be written, UsageError for a `seq_len` of 1.
        """
        refuse_single_tokens(seq_len)
        self.token_files = tuple(files)
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self.num_tokens = sum(file.num_tokens for file in files)
        self._file_starts = np.cumsum([0, *(file.num_tokens for file in files)])
        require_ids(files, vocab_size)
        documents = document_lengths(files)
        self.docs_per_row = max_docs or fewest_docs(piece_lengths(documents, seq_len), seq_len)
        self.index = packed(documents, seq_len, self.docs_per_row, seed)

    @cached_property
    def limits(self) -> tuple[int, int] | None:
        """Most documents of a row, and tokens of the longest; None where there is one to a row, and no borders."""
        return (self.docs_per_row, int(self.index.lengths.max(initial=1))) if self.docs_per_row > 1 else None

    @property
    def num_windows(self) -> int:
        """How many packs there are."""
        return self.index.num_packs

    @property
    def files(self) -> list[tuple[Path, int]]:
        """Path and number of tokens of each file."""
        return [(file.path, file.num_tokens) for file in self.token_files]

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
        for file, first in zip(self.token_files, self._file_starts[:-1].tolist(), strict=True):
            for at in range(0, file.num_tokens if file.mask_bits is not None else 0, READ_AT_ONCE):
                stop = min(at + READ_AT_ONCE, file.num_tokens)
                excluded = ~file.trained(at, stop)
                low, high = np.searchsorted(starts, (first + at, first + stop))
                total -= int(excluded.sum()) - int(excluded[starts[low:high] - first - at].sum())
        return total

    def read(self, samples: np.ndarray) -> Rows:
        """The packs with the numbers `samples` (n,). Targets that the files' masks exclude are -100."""
        shape = (len(samples), self.seq_len)
        tokens, targets = np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
        borders = np.full((len(samples), self.docs_per_row + 1), self.seq_len, np.int32)
        for row, sample in enumerate(np.asarray(samples).tolist()):
            places = zip(*self.index.pack(sample), strict=True)
            lay(tokens[row], targets[row], borders[row], itertools.starmap(self._document, places))
        return Rows(tokens, targets, borders if self.limits else None)

    def _document(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray | bool]:
        """Ids (length,) int32 of the tokens from `start`, and which but the first are trained (length - 1,)."""
        number = int(np.searchsorted(self._file_starts, start, side="right")) - 1
        file = self.token_files[number]
        begin = start - int(self._file_starts[number])
        file.check_ids(self.vocab_size, begin, begin + length)
        ids = file.tokens[begin : begin + length].astype(np.int32)
        return ids, file.mask_bits is None or file.trained(begin + 1, begin + length)


def open_packs(patterns: Iterable[str], seq_len: int, vocab_size: int, seed: int, max_docs: int | None = None) -> Packs:
    """The packs of all files that `patterns` name; errors are those of `open_files` and Packs."""
    return Packs(open_files(patterns), seq_len, vocab_size, seed, max_docs)


def refuse_single_tokens(seq_len: int) -> None:
    """UsageError for rows of one token."""
    if seq_len == 1:
        raise UsageError("--seq-len 1: a document of one token has no target: use 2 or more, or --packing=windows")


def packed(documents: np.ndarray, seq_len: int, max_docs: int, seed: int) -> PackIndex:
    """Which pieces of documents lie in which pack: from the cache, else worked out and put there.

    `documents` (n,) int64 are the lengths of all documents.
    """
    about = f"{seq_len} {max_docs} {seed} {len(documents)} "
    key = hashlib.sha256(MAGIC + about.encode() + documents.astype(START).tobytes()).hexdigest()
    path = cache_folder("packs") / f"{key}.bin"
    found = PackIndex.load(path)
    if found is None:
        found = pack_documents(documents, seq_len, max_docs, seed)
        write_whole(path, found.to_bytes())
    return found


def pack_documents(documents: np.ndarray, seq_len: int, max_docs: int, seed: int) -> PackIndex:
    """Which pieces lie in which pack, of documents of these lengths (n,) int64 that follow each other without a gap."""
    pieces = piece_lengths(documents, seq_len)
    numbers, num_packs = pack(pieces, seq_len, max_docs, seed)
    order = np.argsort(numbers, kind="stable")
    ends = np.concatenate([[0], np.cumsum(np.bincount(numbers, minlength=num_packs))])
    # Each cut is a token that two pieces have.
    cuts = np.repeat(np.arange(len(documents)), piece_counts(documents, seq_len))
    starts = np.cumsum(pieces, dtype=np.int64) - pieces - (np.arange(len(pieces)) - cuts)
    return PackIndex(ends, starts[order], pieces[order])


def lay(
    tokens: np.ndarray, targets: np.ndarray, borders: np.ndarray, documents: Iterable[tuple[np.ndarray, Any]]
) -> None:
    """Writes documents into one row, one after the other; what is left of it stays as it is.

    `tokens` and `targets` (T,) int32, `borders` (D+1,) int32; a document is its ids (n,) and which but the first of
    them are trained, (n - 1,) bool or True.
    """
    at = 0
    for number, (ids, trained) in enumerate(documents):
        stop = at + len(ids)
        tokens[at:stop] = ids
        targets[at : stop - 1] = np.where(trained, ids[1:], IGNORED)
        borders[number] = at
        at = stop


def document_lengths(files: Sequence[TokenFile]) -> np.ndarray:
    """Tokens (n,) int64 of each document of all files, in order. DataError names every file that does not tell."""
    lengths, problems = [np.empty(0, np.int64)], []
    for file in files:
        try:
            lengths.append(np.diff(_document_starts(file)))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
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

    A file that does not count its documents itself (version 1 or 2, or one document where its sidecar tells of several)
    is cut behind each end token of its tokenizer.
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
