"""Token files: read through a map of the file, written piece by piece.

There are llm.q's versions 1 and 2, which are only read, and 3, our own.

All start with 1024 bytes of header, little-endian: bytes 0-7 are `BIN.TOK\\n`, then int32 version and bytes per token.

**1 and 2** continue with int32 number of tokens and, in version 2, vocabulary size and has-masks (0 or 1); the rest of
the header means nothing. Then the tokens as int32 and, if there are masks, the mask bits. The vocabulary size is what
the writer said of its tokenizer, and no bound on the ids: llm.q writes it without the added tokens, often without EOS.

**3** continues at byte 16 with uint64 tokens, uint64 documents, uint32 vocabulary size (every id is below it), uint32
has-masks, the SHA-256 of the tokenizer's tokenizer.json (32 bytes, zeros: not known), and the CRC-32 of the checksum
table; zeros up to the last four bytes, the CRC-32 of the 1020 before them. After the header lie

    tokens      uint16 if the vocabulary has at most 65536 ids, else uint32
    mask bits   if there are masks; then zeros up to a multiple of 8 bytes
    documents   int64 (documents + 1): where each starts, the first at token 0, and then the number of tokens
    checksums   uint32: CRC-32 of each 64 KiB of the bytes between header and checksums

Mask bits, in all versions: one per token, least significant bit first, eight tokens per byte, the last byte filled with
zeros: bit i says whether token i is trained *as a target*.

64 KiB is about what the operating system reads ahead around one window, so checking a block when it is first read costs
no extra reading, and 30 us of arithmetic; the table is 1/16384 of the file.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmq.disk import reading, storage, sync_folder, temporary_name
from llmq.errors import DataError

MAGIC = b"BIN.TOK\n"
HEADER_BYTES = 1024
BLOCK_BYTES = 1 << 16
NEWEST = 3
OF_IMAGES = "which stands for an image, and of this model only text is trained: leave such rows out"
NARROW_IDS = 1 << 16  # vocabularies up to this have ids of two bytes
CHECKSUM = np.dtype("<u4")
START = np.dtype("<i8")
CHECKED_AT_ONCE = 1 << 20  # tokens in memory while they are checked (4 MiB)
SAMPLED_BLOCKS = 16  # of a file without checksums
_LEGACY = struct.Struct("<8s5i")
_CURRENT = struct.Struct("<8s2i2Q2I32sI")


class Places(NamedTuple):
    """Where the parts of a token file lie, in bytes from its start."""

    masks: int
    padding: int
    documents: int
    table: int  # of checksums
    end: int


@dataclass(frozen=True)
class Header:
    """What a token file says of itself, and so where its parts lie."""

    version: int
    num_tokens: int
    vocab_size: int | None  # None in version 1, which does not say it
    has_masks: bool = False
    num_documents: int = 0  # versions 1 and 2 do not say it: one if there are tokens
    tokenizer_sha256: str | None = None  # of the tokenizer.json that made the ids, in hex, where the file says it
    table_checksum: int = 0  # CRC-32 of the table of checksums

    @property
    def token_dtype(self) -> np.dtype:
        return np.dtype("<i4" if self.version < 3 else "<u2" if (self.vocab_size or 0) <= NARROW_IDS else "<u4")

    @cached_property
    def places(self) -> Places:
        masks = HEADER_BYTES + self.num_tokens * self.token_dtype.itemsize
        padding = masks + -(-self.num_tokens // 8) * self.has_masks
        if self.version < 3:
            return Places(masks, padding, padding, padding, padding)
        documents = -(-padding // 8) * 8
        table = documents + START.itemsize * (self.num_documents + 1)
        return Places(
            masks, padding, documents, table, table + CHECKSUM.itemsize * -(-(table - HEADER_BYTES) // BLOCK_BYTES)
        )

    def to_bytes(self) -> bytes:
        """The bytes of the header in a file of version 3."""
        assert self.version == NEWEST
        sha256 = bytes.fromhex(self.tokenizer_sha256 or "00" * 32)
        counts = (self.num_tokens, self.num_documents, self.vocab_size, int(self.has_masks))
        said = _CURRENT.pack(MAGIC, self.version, self.token_dtype.itemsize, *counts, sha256, self.table_checksum)
        said += bytes(HEADER_BYTES - CHECKSUM.itemsize - len(said))
        return said + struct.pack("<I", zlib.crc32(said))

    @classmethod
    def parse(cls, path: Path, data: bytes, size: int) -> Header:
        """The header of the file `path` of `size` bytes, which starts with `data`.

        Raises DataError if it is no token file, or is damaged, truncated or too long.
        """
        if data[: len(MAGIC)] != MAGIC[: len(data)]:
            raise DataError(
                f"{path} is not a token file: it starts with {data[: len(MAGIC)]!r}, not {MAGIC!r}: "
                "make token files from text with tokenize-data"
            )
        if len(data) < HEADER_BYTES:
            raise DataError(
                f"{path} is truncated: {size} bytes, of which the header needs {HEADER_BYTES}: make it again"
            )
        version = int.from_bytes(data[8:12], "little", signed=True)
        if not 1 <= version <= NEWEST:
            raise DataError(f"{path} is of version {version}, but only versions 1 to {NEWEST} can be read")
        if version < 3:
            _, _, token_bytes, tokens, vocab_size, has_masks = _LEGACY.unpack_from(data)
            header, is_right = cls(version, tokens, None, False, min(tokens, 1)), token_bytes == 4 and tokens >= 0
            if version == 2:
                header = replace(header, vocab_size=vocab_size, has_masks=bool(has_masks))
        else:
            _, _, _, tokens, documents, vocab_size, has_masks, sha256, table = _CURRENT.unpack_from(data)
            tokenizer = sha256.hex() if any(sha256) else None
            header = cls(version, tokens, vocab_size, bool(has_masks), documents, tokenizer, table)
            is_right = zlib.crc32(data[:-4]) == int.from_bytes(data[-4:], "little")
        if not is_right:
            raise DataError(f"{path} has a damaged header of version {version}: copy or make it again")
        masks, padding, _, _, end = header.places
        if size != end:
            parts = f"{header.num_tokens} tokens"
            parts += f" and {padding - masks} bytes of masks" if header.has_masks else ""
            parts += f" and {header.num_documents} documents" if version >= 3 else ""
            raise DataError(
                f"{path} {'is truncated' if size < end else 'has extra bytes'}: {size} bytes, but {parts} make {end}: "
                "copy or make it again"
            )
        return header


@dataclass(frozen=True, eq=False)
class TokenFile:
    """An open token file. Arrays are read-only maps of the file: nothing is in memory until it is looked at.

    Version 3 has checksums. Each block of 64 KiB is checked when it is first read through a method or through
    `document_starts`; `tokens` and `mask_bits` are the bare maps. `verify` checks everything.
    """

    path: Path
    header: Header
    data: np.ndarray  # (file_bytes,) uint8: the whole file

    @property
    def num_tokens(self) -> int:
        return self.header.num_tokens

    @property
    def num_documents(self) -> int:
        return self.header.num_documents

    @property
    def fingerprint(self) -> str:
        """Another content has another one. Of all checksums, or before version 3 of a few of its blocks."""
        if self.header.version >= 3:
            return f"{self.num_tokens}-{self.header.table_checksum:08x}"
        crc = 0
        for start in range(0, self.data.size, max(self.data.size // SAMPLED_BLOCKS, BLOCK_BYTES)):
            crc = zlib.crc32(self.data[start : start + BLOCK_BYTES].data, crc)
        return f"{self.num_tokens}-{crc:08x}"

    @cached_property
    def tokens(self) -> np.ndarray:
        """(num_tokens,) int32 in versions 1 and 2, uint16 or uint32 in version 3."""
        return self.data[HEADER_BYTES : self.header.places.masks].view(self.header.token_dtype)

    @cached_property
    def mask_bits(self) -> np.ndarray | None:
        """(ceil(num_tokens / 8),) uint8, or None: every token is trained."""
        masks, padding = self.header.places[:2]
        return self.data[masks:padding] if self.header.has_masks else None

    @cached_property
    def document_starts(self) -> np.ndarray:
        """(num_documents + 1,) int64: the first token of each document, then num_tokens.

        A file of version 1 or 2 is one document. Raises DataError if the file is damaged here, or the starts do not
        rise from 0 to num_tokens.
        """
        begin, end = self.header.places.documents, self.header.places.table
        if self.header.version < 3:
            return np.array([0, self.num_tokens][: self.header.num_documents + 1], np.int64)
        self._check_blocks(begin, end)
        starts = self.data[begin:end].view(START)
        if starts[0] != 0 or starts[-1] != self.num_tokens or (starts[1:] <= starts[:-1]).any():
            raise DataError(
                f"{self.path}: its documents do not rise from token 0 to {self.num_tokens}: make the file again"
            )
        return starts

    @classmethod
    def open(cls, path: str | Path) -> TokenFile:
        """Opens a file whose header and length are right.

        Raises DataError if the file is absent, unreadable, of another format or version, damaged, truncated or too
        long.
        """
        path = Path(path)
        with reading(path, "check the path, or make it with tokenize-data"):
            if not stat.S_ISREG(path.stat().st_mode):
                raise DataError(f"{path} is not a file: give the path of a token file, such as train.bin in it")
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = Header.parse(path, file.read(HEADER_BYTES), size)
                opened = cls(path, header, np.memmap(file, np.uint8, mode="r"))
        if zlib.crc32(opened._table.data) != header.table_checksum:
            raise DataError(f"{path}: its table of checksums is damaged: copy or make the file again")
        return opened

    def trained(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) bool: which of the tokens [start, stop) are trained as targets; DataError if damaged."""
        if self.mask_bits is None:
            return np.ones(stop - start, bool)
        first, last = start // 8, -(-stop // 8)
        masks = self.header.places.masks
        self._check_blocks(masks + first, masks + last)
        bits = np.unpackbits(self.mask_bits[first:last], bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].astype(bool)

    @cached_property
    def num_trained(self) -> int:
        """How many tokens are trained as targets. Reads all masks; DataError if they are damaged."""
        if self.mask_bits is None:
            return self.num_tokens
        starts = range(0, self.num_tokens, CHECKED_AT_ONCE)
        return sum(int(self.trained(at, min(at + CHECKED_AT_ONCE, self.num_tokens)).sum()) for at in starts)

    def count_trained(self, tokens: np.ndarray) -> int:
        """How many of the tokens (n,) with these numbers are trained, of a file whose masks were checked."""
        bits = self.mask_bits
        return len(tokens) if bits is None else int(np.count_nonzero(bits[tokens >> 3] >> (tokens & 7) & 1))

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

    def check_without(self, ids: Sequence[int]) -> None:
        """Raises DataError at the first token that is one of `ids`, which stand for images."""
        for at in range(0, self.num_tokens if ids else 0, CHECKED_AT_ONCE):
            found = np.flatnonzero(np.isin(self.tokens[at : at + CHECKED_AT_ONCE], ids))
            if found.size:
                place = at + int(found[0])
                row = int(np.searchsorted(self.document_starts, place, "right"))
                raise DataError(
                    f"{self.path}: document {row} has the id {int(self.tokens[place])} (token {place}), {OF_IMAGES}"
                )

    def part(self, start: int, stop: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray | bool]:
        """Ids (n,) of the tokens [start, stop), checked, and which but the first are trained: (n - 1,) or all."""
        self.check_ids(vocab_size, start, stop)
        return self.tokens[start:stop], self.mask_bits is None or self.trained(start + 1, stop)

    def document(self, number: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids (n,) int32 of a document, checked, and which of them are trained (n,)."""
        start, stop = self.document_starts[number : number + 2].tolist()
        self.check_ids(vocab_size, start, stop)
        return self.tokens[start:stop].astype(np.int32), self.trained(start, stop)

    @cached_property
    def _table(self) -> np.ndarray:
        return self.data[self.header.places.table :].view(CHECKSUM)

    @cached_property
    def _checked(self) -> bytearray:
        """For each block 1 when its checksum was right."""
        return bytearray(len(self._table))

    def _check_blocks(self, start: int, stop: int) -> None:
        """Checks the blocks with the bytes [start, stop) of the file that were not checked yet."""
        first, last = (start - HEADER_BYTES) // BLOCK_BYTES, -(-(stop - HEADER_BYTES) // BLOCK_BYTES)
        while (block := self._checked.find(0, first, last)) >= 0:
            begin = HEADER_BYTES + block * BLOCK_BYTES
            end = min(begin + BLOCK_BYTES, self.header.places.table)
            if zlib.crc32(self.data[begin:end].data) != self._table[block]:
                raise DataError(
                    f"{self.path} is damaged between the bytes {begin} and {end}, which have another checksum than "
                    "when they were written: copy or make the file again"
                )
            self._checked[block] = 1


class TokenWriter:
    """Writes a token file piece by piece under a temporary name; it takes its real name when it is complete.

    As a context manager, it finishes the file at the end, and after an exception leaves nothing. Mask bits and document
    starts are in memory until then. All methods raise StorageError if the disk does not take the bytes.
    """

    def __init__(
        self, path: str | Path, vocab_size: int, has_masks: bool = False, tokenizer_sha256: str | None = None
    ) -> None:
        """`vocab_size` bounds the ids."""
        self.path = Path(path)
        self.header = Header(NEWEST, 0, vocab_size, has_masks, 0, tokenizer_sha256)
        self.num_tokens = self.num_trained = 0
        self._starts = array("q", [0])  # of documents; the last is where the next one begins
        self._masks, self._bits = bytearray(), np.zeros(0, bool)  # whole bytes, and the bits that do not fill one yet
        self._temporary = temporary_name(self.path)
        with storage(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("w+b")
            self._file.write(bytes(HEADER_BYTES))

    @property
    def num_documents(self) -> int:
        """Those that have ended."""
        return len(self._starts) - 1

    def append(
        self, tokens: np.ndarray, mask: np.ndarray | None = None, stops: np.ndarray | Sequence[int] = ()
    ) -> None:
        """Adds `tokens` (n,) int; in a file with masks, `mask` (n,) bool says which are trained as targets (None: all).

        Documents end after the first `stops[i]` of them, ascending from 1; the last continues where no stop is n.
        Raises DataError for an id outside the vocabulary.
        """
        tokens, vocab_size = np.asarray(tokens), self.header.vocab_size
        assert tokens.ndim == 1 and (tokens.dtype.kind in "iu" or not tokens.size)
        assert vocab_size is not None and (mask is None or self.header.has_masks)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            bad = int(tokens.max() if tokens.min() >= 0 else tokens.min())
            raise DataError(f"{self.path}: the id {bad} is outside the vocabulary (0 to {vocab_size - 1})")
        with storage(self.path):
            self._file.write(tokens.astype(self.header.token_dtype).tobytes())
        trained = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask, bool)
        if self.header.has_masks:
            assert trained.shape == tokens.shape
            bits = np.concatenate([self._bits, trained])
            whole = len(bits) // 8 * 8
            self._masks += np.packbits(bits[:whole], bitorder="little").tobytes()
            self._bits = bits[whole:]
        self._starts.extend((np.asarray(stops, np.int64) + self.num_tokens).tolist())
        self.num_tokens += tokens.size
        self.num_trained += int(np.count_nonzero(trained))

    def finish(self) -> None:
        """Ends the last document and gives the file its real name, in place of an older file, once the disk has it."""
        if self.num_tokens > self._starts[-1]:
            self._starts.append(self.num_tokens)
        header = replace(self.header, num_tokens=self.num_tokens, num_documents=self.num_documents)
        with storage(self.path), self._file as file:
            if header.has_masks:
                file.write(self._masks + np.packbits(self._bits, bitorder="little").tobytes())
            file.write(bytes(header.places.documents - file.tell()))
            file.write(np.array(self._starts, START).tobytes())
            assert file.tell() == header.places.table
            file.seek(HEADER_BYTES)
            checksums = [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]
            table = np.array(checksums, CHECKSUM).tobytes()
            file.write(table)
            file.seek(0)
            file.write(replace(header, table_checksum=zlib.crc32(table)).to_bytes())
            file.flush()
            os.fsync(file.fileno())
        with storage(self.path):
            os.replace(self._temporary, self.path)
            sync_folder(self.path.parent)

    def discard(self) -> None:
        """Removes what was written, unless it is finished."""
        with suppress(OSError):  # a full disk fails again on the buffered rest, which is not wanted any more
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *about: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.discard()
