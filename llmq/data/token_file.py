"""Token files in llm.q's format, version 2: written and read here and nowhere else.

1024 bytes of header, which are 256 int32 words, little-endian: bytes 0-7 are `BIN.TOK\\n`, then version (2), bytes per
token (4), number of tokens, vocabulary size, has-masks (0 or 1); the rest of the header means nothing. Then the tokens
as int32. Then, if there are masks, one bit per token, least significant bit first, eight tokens per byte, the last byte
filled with zeros: bit i says whether token i is trained *as a target*.

The vocabulary size in the header is what the writer said of its tokenizer, and no bound on the ids: llm.q writes it
without the added tokens, of which EOS may be one. Ids are checked against the model's vocabulary.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from llmq.disk import sync_folder
from llmq.errors import DataError, StorageError

MAGIC = b"BIN.TOK\n"
VERSION = 2
HEADER_BYTES = 1024
TOKEN = np.dtype("<i4")
FILLER = b"*" * (HEADER_BYTES - 1) + b"\n"  # what llm.q leaves in the rest of the header
MAX_TOKENS = 2**31 - 1  # the count is an int32
CHECKED_AT_ONCE = 1 << 20  # tokens held in memory while ids are checked (4 MiB)


@dataclass(frozen=True, eq=False)
class TokenFile:
    """An open token file. The arrays are read-only maps of the file: nothing is in memory until it is looked at."""

    path: Path
    vocab_size: int  # as the header says
    tokens: np.ndarray  # (num_tokens,) int32
    mask_bits: np.ndarray | None  # (ceil(num_tokens / 8),) uint8, or None: every token is trained

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @classmethod
    def open(cls, path: str | Path, *, vocab_size: int | None = None) -> TokenFile:
        """Opens a file whose header and length are right, and with `vocab_size` one whose ids are all below it.

        Raises DataError, naming everything that is wrong, if the file is absent, unreadable, of another format or
        version, truncated or too long, or holds other ids. The check of the ids reads the whole file once.
        """
        path = Path(path)
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise DataError(f"{path} is not a file: give the path of a token file, such as train.bin in it")
            with path.open("rb") as file:
                opened = cls._map(path, file)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}): check the path, or make it with tokenize-data"
            ) from None
        if vocab_size is not None:
            opened.check_ids(vocab_size)
        return opened

    @classmethod
    def _map(cls, path: Path, file: BinaryIO) -> TokenFile:
        size = os.fstat(file.fileno()).st_size
        header = file.read(HEADER_BYTES)
        if header[: len(MAGIC)] != MAGIC[: len(header)]:
            raise DataError(
                f"{path} is not a token file: it starts with {header[: len(MAGIC)]!r}, not {MAGIC!r}: "
                "make token files from text with tokenize-data"
            )
        if len(header) < HEADER_BYTES:
            raise DataError(
                f"{path} is truncated: {size} bytes, of which the header needs {HEADER_BYTES}: make it again"
            )
        version, token_bytes, count, vocab_size, has_masks = np.frombuffer(header, TOKEN, 5, len(MAGIC)).tolist()
        wrong = []
        if version != VERSION:
            wrong.append(f"version {version}, but only version {VERSION} can be read")
        if token_bytes != TOKEN.itemsize:
            wrong.append(f"{token_bytes} bytes per token, but version {VERSION} has {TOKEN.itemsize}")
        if count < 0:
            wrong.append(f"a count of {count} tokens, which is negative")
        if vocab_size < 1:
            wrong.append(f"a vocabulary of {vocab_size}, which is less than 1")
        if has_masks not in (0, 1):
            wrong.append(f"{has_masks} for has-masks, which is 0 or 1")
        if not wrong:
            mask_bytes = has_masks * _mask_bytes(count)
            needed = HEADER_BYTES + count * TOKEN.itemsize + mask_bytes
            if size != needed:
                kind = "is truncated" if size < needed else "has extra bytes"
                masks = f" and {mask_bytes} bytes of masks" if has_masks else ""
                raise DataError(
                    f"{path} {kind}: {size} bytes, but {count} tokens{masks} make {needed}: copy or make it again"
                )
        else:
            raise DataError(f"{path} has a header with {'; '.join(wrong)}: make it again with tokenize-data")
        bits = (
            _mapped(file, np.dtype(np.uint8), HEADER_BYTES + count * TOKEN.itemsize, mask_bytes) if has_masks else None
        )
        return cls(path, vocab_size, _mapped(file, TOKEN, HEADER_BYTES, count), bits)

    def trained(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) bool: which of the tokens [start, stop) are trained as targets."""
        if self.mask_bits is None:
            return np.ones(stop - start, bool)
        first = start // 8
        bits = np.unpackbits(self.mask_bits[first : _mask_bytes(stop)], bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].astype(bool)

    def check_ids(self, vocab_size: int, start: int = 0, stop: int | None = None) -> None:
        """Raises DataError at the first of the tokens [start, stop) that is not in 0 .. vocab_size - 1."""
        stop = self.num_tokens if stop is None else stop
        for at in range(start, stop, CHECKED_AT_ONCE):
            ids = self.tokens[at : min(at + CHECKED_AT_ONCE, stop)]
            # As unsigned numbers, negative ids are large ones.
            if ids.view("<u4").max(initial=0) >= vocab_size:
                place = int(np.argmax(ids.view("<u4") >= vocab_size))
                raise DataError(
                    f"{self.path}: token {at + place} has the id {int(ids[place])}, but the vocabulary has "
                    f"{vocab_size} ids (0 to {vocab_size - 1}): tokenize the text with the model's own tokenizer"
                )

    @classmethod
    def write(cls, path: str | Path, tokens: np.ndarray, *, vocab_size: int, mask: np.ndarray | None = None) -> None:
        """Writes `tokens` (n,) and, if given, `mask` (n,) bool as a whole file; see TokenWriter for the errors."""
        with TokenWriter(path, vocab_size=vocab_size, has_masks=mask is not None) as writer:
            writer.append(tokens, mask)


class TokenWriter:
    """Writes a token file piece by piece under a temporary name; it takes its real name when it is complete.

    As a context manager, it publishes at the end and, after an exception, leaves nothing. To publish several files
    together, `seal` each and then `publish` each. All methods raise StorageError if the disk does not take the bytes.
    """

    def __init__(self, path: str | Path, *, vocab_size: int, has_masks: bool = False) -> None:
        self.path = Path(path)
        self.vocab_size = vocab_size
        self.num_tokens = 0
        self._temporary = temporary_name(self.path)
        self._bits = np.zeros(0, bool)  # mask bits that do not fill a byte yet
        self._masks: BinaryIO | None = None
        self._masks_name = temporary_name(self.path.with_name(self.path.name + ".masks"))
        self._sealed = False
        with storage(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self._temporary.open("wb")
            self._file.write(FILLER)
            if has_masks:
                self._masks = self._masks_name.open("w+b")

    def append(self, tokens: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Adds `tokens` (n,) int and, in a file with masks, `mask` (n,) bool: whether each is trained as a target.

        Raises DataError for an id outside the vocabulary or more tokens than the format can count.
        """
        tokens = np.asarray(tokens)
        assert tokens.ndim == 1 and (tokens.dtype.kind in "iu" or not tokens.size)
        assert (mask is not None) == (self._masks is not None)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            bad = int(tokens.max() if tokens.min() >= 0 else tokens.min())
            raise DataError(f"{self.path}: the id {bad} is outside the vocabulary (0 to {self.vocab_size - 1})")
        if self.num_tokens + tokens.size > MAX_TOKENS:
            raise DataError(
                f"{self.path}: more than {MAX_TOKENS} tokens, which is what one file can count: "
                "split the input and write several files"
            )
        with storage(self.path):
            self._file.write(tokens.astype(TOKEN).tobytes())
            if self._masks is not None:
                assert mask is not None and np.shape(mask) == tokens.shape
                bits = np.concatenate([self._bits, np.asarray(mask, bool)])
                whole = len(bits) // 8 * 8
                self._masks.write(np.packbits(bits[:whole], bitorder="little").tobytes())
                self._bits = bits[whole:]
        self.num_tokens += tokens.size

    def seal(self) -> None:
        """Completes the file under its temporary name, and waits until the disk has it."""
        with storage(self.path):
            if self._masks is not None:
                self._masks.write(np.packbits(self._bits, bitorder="little").tobytes())
                self._masks.seek(0)
                while chunk := self._masks.read(1 << 20):
                    self._file.write(chunk)
                self._masks.close()
                self._masks_name.unlink()
            words = [VERSION, TOKEN.itemsize, self.num_tokens, self.vocab_size, int(self._masks is not None)]
            self._file.seek(0)
            self._file.write(MAGIC + np.array(words, TOKEN).tobytes())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        self._sealed = True

    def publish(self) -> None:
        """Gives a sealed file its real name, in place of an older file of that name."""
        assert self._sealed
        with storage(self.path):
            os.replace(self._temporary, self.path)
            sync_folder(self.path.parent)

    def discard(self) -> None:
        """Removes what was written and not published."""
        for file, name in ((self._file, self._temporary), (self._masks, self._masks_name)):
            if file is not None:
                try:
                    file.close()
                except OSError:  # a full disk fails again on the buffered rest, which is not wanted any more
                    pass
            name.unlink(missing_ok=True)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._sealed:
                self.seal()
                self.publish()
        finally:
            self.discard()


def write_whole(path: Path, content: bytes) -> None:
    """Writes a small file so that it is there whole or not at all; StorageError if the disk does not take it."""
    temporary = temporary_name(path)
    with storage(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """Where `path` is written before it is complete: hidden, beside it, and this process's own."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextmanager
def storage(path: Path) -> Iterator[None]:
    """Turns what the operating system says while writing `path` into a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror or error}): free some space or choose another folder"
        ) from error


def _mask_bytes(num_tokens: int) -> int:
    return -(-num_tokens // 8)


def _mapped(file: BinaryIO, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    if not count:  # the operating system maps no empty ranges
        return np.empty(0, dtype)
    return np.memmap(file, dtype, mode="r", offset=offset, shape=(count,))
