"""Token files, read through a map of the file and written piece by piece. Bytes: token_format.py."""

from __future__ import annotations

import os
import shutil
import stat
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from llmq.data.tokens.token_format import (
    BLOCK_BYTES,
    CHECKSUM,
    FILLER,
    HEADER_BYTES,
    NEWEST,
    START,
    VERSIONS,
    Header,
    mask_bytes,
)
from llmq.disk import reading, storage, sync_folder, temporary_name
from llmq.errors import DataError, StorageError, UsageError

MASKS, DOCUMENTS = ".masks", ".documents"  # what is written beside the tokens until a file is complete
STATE = {"version", "vocab_size", "has_masks", "tokenizer_sha256", "tokens", "documents", "document_start", "bytes"}
STATE |= {"mask_bits"}  # what a writer's state has in it
MAX_LEGACY_TOKENS = 2**31 - 1  # the count is an int32 in versions 1 and 2

CHECKED_AT_ONCE = 1 << 20  # tokens, or documents, held in memory while they are checked (4 or 8 MiB)
SAMPLED_BLOCKS = 16  # of a file without checksums


@dataclass(frozen=True, eq=False)
class TokenFile:
    """An open token file. Arrays are read-only maps of the file: nothing is in memory until it is looked at.

    Version 3 has checksums. Each block of 64 KiB is checked when it is first read through a method or through
    `document_starts`; `tokens` and `mask_bits` are the bare maps. `verify` checks everything.
    """

    path: Path
    header: Header
    data: np.ndarray  # (file_bytes,) uint8: the whole file
    _checked: bytearray = field(default_factory=bytearray, repr=False)  # for each block: 1 when its checksum was right

    @property
    def num_tokens(self) -> int:
        return self.header.num_tokens

    @property
    def num_documents(self) -> int:
        return self.header.num_documents

    @property
    def vocab_size(self) -> int | None:
        """As the header says; None in version 1. Only in version 3 it is a bound on the ids."""
        return self.header.vocab_size

    @property
    def tokenizer_sha256(self) -> str | None:
        """SHA-256 of the tokenizer.json that made the ids, in hex, where the file says it."""
        return self.header.tokenizer_sha256

    @property
    def fingerprint(self) -> str:
        """Tells the file's content from another's: by all its checksums, or before version 3 by a few of its blocks."""
        if self.header.version >= 3:
            return f"{self.num_tokens}-{self.header.table_checksum:08x}"
        crc = 0
        for start in range(0, self.data.size, max(self.data.size // SAMPLED_BLOCKS, BLOCK_BYTES)):
            crc = zlib.crc32(self.data[start : start + BLOCK_BYTES].data, crc)
        return f"{self.num_tokens}-{crc:08x}"

    @cached_property
    def tokens(self) -> np.ndarray:
        """(num_tokens,) int32 in versions 1 and 2, uint16 or uint32 in version 3."""
        return self.data[HEADER_BYTES : self.header.masks_at].view(self.header.token_dtype)

    @cached_property
    def mask_bits(self) -> np.ndarray | None:
        """(ceil(num_tokens / 8),) uint8, or None: every token is trained."""
        start = self.header.masks_at
        return self.data[start : start + self.header.mask_bytes] if self.header.has_masks else None

    @cached_property
    def document_starts(self) -> np.ndarray:
        """(num_documents + 1,) int64: the first token of each document, then num_tokens.

        A file of version 1 or 2 is one document. Raises DataError if the file is damaged here, or the starts do not
        rise from 0 to num_tokens.
        """
        header = self.header
        if header.version < 3:
            return np.array([0, self.num_tokens][: header.num_documents + 1], np.int64)
        self._check_blocks(header.documents_at, header.table_at)
        starts = self.data[header.documents_at : header.table_at].view(START)
        wrong = starts[0] != 0 or starts[-1] != self.num_tokens
        for at in range(0, header.num_documents, CHECKED_AT_ONCE):
            part = starts[at : at + CHECKED_AT_ONCE + 1]
            wrong = wrong or bool((part[1:] <= part[:-1]).any())
        if wrong:
            raise DataError(
                f"{self.path}: its documents do not rise from token 0 to {self.num_tokens}: make the file again"
            )
        return starts

    @classmethod
    def open(cls, path: str | Path, *, vocab_size: int | None = None) -> TokenFile:
        """Opens a file whose header and length are right, and with `vocab_size` one whose ids are all below it.

        Raises DataError, naming everything that is wrong, if the file is absent, unreadable, of another format or
        version, damaged, truncated or too long, or holds other ids. The check of the ids reads the whole file once.
        """
        path = Path(path)
        with reading(path, "check the path, or make it with tokenize-data"):
            if not stat.S_ISREG(path.stat().st_mode):
                raise DataError(f"{path} is not a file: give the path of a token file, such as train.bin in it")
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = Header.parse(path, file.read(HEADER_BYTES), size)
                opened = cls(path, header, np.memmap(file, np.uint8, mode="r"), bytearray(header.num_blocks))
        if zlib.crc32(opened._table.data) != header.table_checksum:
            raise DataError(f"{path}: its table of checksums is damaged: copy or make the file again")
        if vocab_size is not None:
            opened.check_ids(vocab_size)
        return opened

    def verify(self) -> None:
        """Checks every checksum, the documents and, in version 3, that the ids are of the file's own vocabulary.

        Reads the whole file once. Raises DataError. Versions 1 and 2 have nothing that could be checked.
        """
        if self.header.version < 3:
            return
        self._check_blocks(HEADER_BYTES, self.header.table_at)
        self.document_starts  # noqa: B018 (it is checked when it is made)
        assert self.vocab_size is not None
        self.check_ids(self.vocab_size)

    def trained(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) bool: which of the tokens [start, stop) are trained as targets; DataError if damaged."""
        if self.mask_bits is None:
            return np.ones(stop - start, bool)
        first, last = start // 8, mask_bytes(stop)
        self._check_blocks(self.header.masks_at + first, self.header.masks_at + last)
        bits = np.unpackbits(self.mask_bits[first:last], bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].astype(bool)

    @cached_property
    def num_trained(self) -> int:
        """How many tokens are trained as targets. Reads all masks; DataError if they are damaged."""
        starts = range(0, self.num_tokens if self.mask_bits is not None else 0, CHECKED_AT_ONCE)
        excluded = (~self.trained(at, min(at + CHECKED_AT_ONCE, self.num_tokens)) for at in starts)
        return self.num_tokens - sum(int(np.count_nonzero(block)) for block in excluded)

    def check_ids(self, vocab_size: int, start: int = 0, stop: int | None = None) -> None:
        """Raises DataError if the tokens [start, stop) are damaged, or at the first not in 0 .. vocab_size - 1."""
        stop = self.num_tokens if stop is None else stop
        size = self.header.token_dtype.itemsize
        for at in range(start, stop, CHECKED_AT_ONCE):
            end = min(at + CHECKED_AT_ONCE, stop)
            self._check_blocks(HEADER_BYTES + at * size, HEADER_BYTES + end * size)
            # As unsigned numbers, negative ids are large ones.
            ids = self.tokens[at:end].view(f"<u{size}")
            if ids.max(initial=0) >= vocab_size:
                place = int(np.argmax(ids >= vocab_size))
                raise DataError(
                    f"{self.path}: token {at + place} has the id {int(self.tokens[at + place])}, but the vocabulary "
                    f"has {vocab_size} ids (0 to {vocab_size - 1}): tokenize the text with the model's own tokenizer"
                )

    @property
    def _table(self) -> np.ndarray:
        return self.data[self.header.table_at :].view(CHECKSUM)

    def _check_blocks(self, start: int, stop: int) -> None:
        """Checks the blocks with the bytes [start, stop) of the file that were not checked yet."""
        first, last = (start - HEADER_BYTES) // BLOCK_BYTES, -(-(stop - HEADER_BYTES) // BLOCK_BYTES)
        while (block := self._checked.find(0, first, last)) >= 0:
            begin = HEADER_BYTES + block * BLOCK_BYTES
            end = min(begin + BLOCK_BYTES, self.header.table_at)
            if zlib.crc32(self.data[begin:end].data) != self._table[block]:
                raise DataError(
                    f"{self.path} is damaged between the bytes {begin} and {end}, which have another checksum than "
                    "when they were written: copy or make the file again"
                )
            self._checked[block] = 1

    @classmethod
    def write(cls, path: str | Path, tokens: np.ndarray, *, mask: np.ndarray | None = None, **about: Any) -> None:
        """Writes `tokens` (n,) and, if given, `mask` (n,) bool as a whole file of one document; see TokenWriter."""
        with TokenWriter(path, has_masks=mask is not None, **about) as writer:
            writer.append(tokens, mask)


class TokenWriter:
    """Writes a token file piece by piece under a temporary name; it takes its real name when it is complete.

    As a context manager, it publishes at the end and, after an exception, leaves nothing. To publish several files
    together, `seal` each and then `publish` each. All methods raise StorageError if the disk does not take the bytes.

    A `resumable` writer keeps what it wrote after an exception, and after a kill: `resume` with the last `state` goes
    on, `discard` removes it. Its temporary names are the same in every process, so only one may write at a time.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        vocab_size: int,
        has_masks: bool = False,
        version: int = NEWEST,
        tokenizer_sha256: str | None = None,
        resumable: bool = False,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`vocab_size` bounds the ids; version 1 does not hold it, and only version 3 holds the tokenizer's hash.

        `state` is what `resume` goes on from. Raises UsageError for masks in version 1, which has none.
        """
        assert version in VERSIONS
        if has_masks and version == 1:
            raise UsageError(f"{path}: token files of version 1 have no masks: write version 2 or {NEWEST}")
        self.path = Path(path)
        self.header = Header(version, 0, vocab_size, has_masks, 0, tokenizer_sha256)
        self.num_tokens = self.num_documents = 0
        self._resumable, self._sealed = resumable, False
        self._document_start = 0
        self._bits = np.zeros(0, bool)  # mask bits that do not fill a byte yet
        parts = ["", *([MASKS] if has_masks else []), *([DOCUMENTS] if version >= 3 else [])]
        hidden = partial_name if resumable else temporary_name
        self._names = {part: hidden(self.path.with_name(self.path.name + part)) for part in parts}
        self._files: dict[str, BinaryIO] = {}
        with storage(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for part, name in self._names.items():
                self._files[part] = name.open("w+b" if state is None else "r+b")
            if state is None:
                self._files[""].write(FILLER)
                self._put(DOCUMENTS, np.zeros(1, START))
            else:
                self._go_on(state)

    @classmethod
    def resume(cls, path: str | Path, state: Mapping[str, Any]) -> TokenWriter:
        """A resumable writer of `path` that goes on where `state` was taken; what was written after it is cut off.

        Raises DataError if what the earlier writer left is gone or does not hold that much.
        """
        path = Path(path)
        if missing := STATE - set(state):
            raise DataError(f"the state to resume {path} from lacks {', '.join(sorted(missing))}: start over")
        about = {name: state[name] for name in ("vocab_size", "has_masks", "version", "tokenizer_sha256")}
        try:
            return cls(path, **about, resumable=True, state=state)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise DataError(f"{partial_name(path)} is gone, so it cannot be gone on with: start over") from None
            raise

    def state(self) -> dict[str, Any]:
        """What `resume` needs to go on from here, as JSON knows it; the disk has all of it when this returns."""
        with storage(self.path):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
        return {
            "version": self.header.version,
            "vocab_size": self.header.vocab_size,
            "has_masks": self.header.has_masks,
            "tokenizer_sha256": self.header.tokenizer_sha256,
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "document_start": self._document_start,
            "bytes": self._files[""].tell(),
            "mask_bits": self._bits.astype(int).tolist(),
        }

    def _go_on(self, state: Mapping[str, Any]) -> None:
        self.num_tokens, self.num_documents = state["tokens"], state["documents"]
        self._document_start = state["document_start"]
        self._bits = np.array(state["mask_bits"], bool)
        sizes = {
            "": state["bytes"],
            MASKS: self.num_tokens // 8,
            DOCUMENTS: START.itemsize * (self.num_documents + 1),
        }
        short = []
        for part, file in self._files.items():
            if file.seek(0, os.SEEK_END) < sizes[part]:
                short.append(f"{self._names[part]} has {file.tell()} of {sizes[part]} bytes")
            file.truncate(sizes[part])
            file.seek(sizes[part])
        if short:
            self.close()
            raise DataError(f"{self.path} cannot be gone on with: {', '.join(short)}: start over")

    def append(
        self, tokens: np.ndarray, mask: np.ndarray | None = None, *, stops: np.ndarray | Sequence[int] = ()
    ) -> None:
        """Adds `tokens` (n,) int and, in a file with masks, `mask` (n,) bool: whether each is trained as a target.

        Documents end behind the first `stops[i]` of them, which rise from 1 on; the last goes on where no stop is n.
        Raises DataError for an id outside the vocabulary or more tokens than the format can count.
        """
        tokens = np.asarray(tokens)
        assert tokens.ndim == 1 and (tokens.dtype.kind in "iu" or not tokens.size)
        assert (mask is not None) == self.header.has_masks
        vocab_size = self.header.vocab_size
        assert vocab_size is not None
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            bad = int(tokens.max() if tokens.min() >= 0 else tokens.min())
            raise DataError(f"{self.path}: the id {bad} is outside the vocabulary (0 to {vocab_size - 1})")
        if self.header.version < 3 and self.num_tokens + tokens.size > MAX_LEGACY_TOKENS:
            raise DataError(
                f"{self.path}: more than {MAX_LEGACY_TOKENS} tokens, which is what one file of version "
                f"{self.header.version} can count: write version {NEWEST}, or several files"
            )
        with storage(self.path):
            self._put("", tokens.astype(self.header.token_dtype))
            if mask is not None:
                assert np.shape(mask) == tokens.shape
                bits = np.concatenate([self._bits, np.asarray(mask, bool)])
                whole = len(bits) // 8 * 8
                self._put(MASKS, np.packbits(bits[:whole], bitorder="little"))
                self._bits = bits[whole:]
            if len(stops):
                self._put(DOCUMENTS, np.asarray(stops, START) + self.num_tokens)
                self.num_documents += len(stops)
                self._document_start = self.num_tokens + int(stops[-1])
        self.num_tokens += tokens.size

    def end_document(self) -> None:
        """Ends a document behind the tokens so far; without tokens since the last end there is none to end."""
        if self.num_tokens > self._document_start:
            with storage(self.path):
                self._put(DOCUMENTS, np.array([self.num_tokens], START))
            self.num_documents += 1
            self._document_start = self.num_tokens

    def seal(self) -> None:
        """Completes the file under its temporary name, and waits until the disk has it. Ends the last document."""
        self.end_document()
        header = replace(self.header, num_tokens=self.num_tokens, num_documents=self.num_documents)
        with storage(self.path):
            body = self._files[""]
            if header.has_masks:
                self._put(MASKS, np.packbits(self._bits, bitorder="little"))
            for part, start in ((MASKS, header.masks_at), (DOCUMENTS, header.documents_at)):
                if part in self._files:
                    body.write(bytes(start - body.tell()))
                    self._files[part].seek(0)
                    shutil.copyfileobj(self._files[part], body)
            assert body.tell() == header.table_at
            if header.version >= 3:
                body.seek(HEADER_BYTES)
                blocks = iter(lambda: body.read(BLOCK_BYTES), b"")
                table = np.array([zlib.crc32(block) for block in blocks], CHECKSUM).tobytes()
                body.write(table)
                header = replace(header, table_checksum=zlib.crc32(table))
            body.seek(0)
            body.write(header.to_bytes())
            body.flush()
            os.fsync(body.fileno())
            body.close()
        self._sealed = True

    def publish(self) -> None:
        """Gives a sealed file its real name, in place of an older file of that name."""
        assert self._sealed
        with storage(self.path):
            os.replace(self._names[""], self.path)
            sync_folder(self.path.parent)
        self.discard()

    def discard(self) -> None:
        """Removes what was written and not published."""
        self.close()
        for name in self._names.values():
            name.unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the writing; the temporary files stay, for `resume`."""
        for file in self._files.values():
            try:
                file.close()
            except OSError:  # a full disk fails again on the buffered rest, which is not wanted any more
                pass

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        done = False
        try:
            if kind is None and not self._sealed:
                self.seal()
                self.publish()
            done = kind is None
        finally:
            if done or not self._resumable:
                self.discard()
            else:
                self.close()

    def _put(self, part: str, values: np.ndarray) -> None:
        if part in self._files:
            self._files[part].write(values.tobytes())


def partial_name(path: Path) -> Path:
    """Where `path` is written before it is complete by a writer that another process may go on with."""
    return path.with_name(f".{path.name}.partial")
