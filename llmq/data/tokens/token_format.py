"""What the bytes of a token file mean, in each of its versions: llm.q's 1 and 2, which are only read, and 3, our own.

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

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmq.errors import DataError

MAGIC = b"BIN.TOK\n"
HEADER_BYTES = 1024
BLOCK_BYTES = 1 << 16
VERSIONS = (1, 2, 3)
NEWEST = 3
NARROW_IDS = 1 << 16  # vocabularies up to this have ids of two bytes
CHECKSUM = np.dtype("<u4")
START = np.dtype("<i8")
_LEGACY = struct.Struct("<8s5i")
_CURRENT = struct.Struct("<8s2i2Q2I32sI")


@dataclass(frozen=True)
class Header:
    """What a token file says of itself, and so where its parts lie. All offsets are bytes from the file's start."""

    version: int
    num_tokens: int
    vocab_size: int | None  # None in version 1, which does not say it
    has_masks: bool = False
    num_documents: int = 0  # versions 1 and 2 do not say it: one if there are tokens
    tokenizer_sha256: str | None = None  # in hex
    table_checksum: int = 0  # CRC-32 of the table of checksums

    @property
    def token_dtype(self) -> np.dtype:
        if self.version < 3:
            return np.dtype("<i4")
        assert self.vocab_size is not None
        return np.dtype("<u2" if self.vocab_size <= NARROW_IDS else "<u4")

    @property
    def masks_at(self) -> int:
        return HEADER_BYTES + self.num_tokens * self.token_dtype.itemsize

    @property
    def mask_bytes(self) -> int:
        return mask_bytes(self.num_tokens) if self.has_masks else 0

    @property
    def documents_at(self) -> int:
        end = self.masks_at + self.mask_bytes
        return end if self.version < 3 else -(-end // 8) * 8

    @property
    def table_at(self) -> int:
        return self.documents_at + (START.itemsize * (self.num_documents + 1) if self.version >= 3 else 0)

    @property
    def num_blocks(self) -> int:
        return -(-(self.table_at - HEADER_BYTES) // BLOCK_BYTES) if self.version >= 3 else 0

    @property
    def file_bytes(self) -> int:
        return self.table_at + CHECKSUM.itemsize * self.num_blocks

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

        Raises DataError, naming all that is wrong, if it is no token file, or is damaged, truncated or too long.
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
        if version not in VERSIONS:
            wrong = [f"version {version}, but only versions 1 to {NEWEST} can be read"]
        else:
            header, wrong = _legacy(data) if version < 3 else _current(data)
        if wrong:
            raise DataError(f"{path} has a header with {'; '.join(wrong)}: make it again with tokenize-data")
        if size != header.file_bytes:
            parts = f"{header.num_tokens} tokens"
            parts += f" and {header.mask_bytes} bytes of masks" if header.has_masks else ""
            parts += f" and {header.num_documents} documents" if version >= 3 else ""
            raise DataError(
                f"{path} {'is truncated' if size < header.file_bytes else 'has extra bytes'}: {size} bytes, "
                f"but {parts} make {header.file_bytes}: copy or make it again"
            )
        return header


def _legacy(data: bytes) -> tuple[Header, list[str]]:
    _, version, token_bytes, count, vocab_size, has_masks = _LEGACY.unpack_from(data)
    wrong = []
    if token_bytes != 4:
        wrong.append(f"{token_bytes} bytes per token, but version {version} has 4")
    if count < 0:
        wrong.append(f"a count of {count} tokens, which is negative")
    if version == 1:
        return Header(1, count, None, False, min(count, 1)), wrong
    if vocab_size < 1:
        wrong.append(f"a vocabulary of {vocab_size}, which is less than 1")
    if has_masks not in (0, 1):
        wrong.append(f"{has_masks} for has-masks, which is 0 or 1")
    return Header(2, count, vocab_size, has_masks == 1, min(count, 1)), wrong


def _current(data: bytes) -> tuple[Header, list[str]]:
    _, _, token_bytes, tokens, documents, vocab_size, has_masks, sha256, table = _CURRENT.unpack_from(data)
    header = Header(3, tokens, vocab_size, has_masks == 1, documents, sha256.hex() if any(sha256) else None, table)
    wrong = []
    if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        wrong.append("a checksum that is not its own, so it is damaged")
    if vocab_size < 1:
        wrong.append("a vocabulary of 0")
    if token_bytes != header.token_dtype.itemsize:
        wrong.append(f"{token_bytes} bytes per token, but {vocab_size} ids need {header.token_dtype.itemsize}")
    if has_masks not in (0, 1):
        wrong.append(f"{has_masks} for has-masks, which is 0 or 1")
    if documents > tokens or (tokens and not documents):
        wrong.append(f"{documents} documents for {tokens} tokens")
    return header, wrong


def mask_bytes(num_tokens: int) -> int:
    """Bytes that the mask bits of `num_tokens` take."""
    return -(-num_tokens // 8)
