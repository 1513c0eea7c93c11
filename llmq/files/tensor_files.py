"""Safetensors files: written as a stream, tensor by tensor, with a checksum; what is in one; one tensor of it.

The library's writer wants all tensors of a file in memory at once, which is 5 GB for an export. Here the header is
written first, since names, shapes and dtypes are known before the first value. Headers are read and validated by the
library; it cannot read fp8 into NumPy, so bytes are read here.

A checksum is CRC-32 over the data and then the header. CRC-32 rather than SHA-256: it guards against damage, not
forgery, at 3.7 instead of 1.6 GB/s on one EPYC core.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401 - safetensors < 0.6 finds NumPy's bfloat16 only once this is imported
import numpy as np
from safetensors import SafetensorError, safe_open

from llmq.disk import reading
from llmq.errors import DataError
from llmq.tensor import DTYPES

READ_BYTES = 16 << 20


def file_name(dtype: np.dtype) -> str:
    """What safetensors calls a dtype: BF16, F8_E4M3, I32, U8."""
    name = dtype.name.upper().removesuffix("FN")
    return name.replace("BFLOAT", "BF").replace("FLOAT", "F").replace("UINT", "U").replace("INT", "I")


OUR_NAMES = {file_name(dtype): name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape, its storage type as safetensors names it, and where its bytes start."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    start: int


@dataclass(frozen=True)
class Shard:
    """One finished file: its name in the folder, its size, and its checksum."""

    name: str
    num_bytes: int
    crc32: int


def cut(pieces: Iterable[Piece], shard_bytes: int) -> list[list[Piece]]:
    """Pieces in order, cut into files of at most `shard_bytes` of data (or one piece, where that is larger)."""
    files: list[list[Piece]] = [[]]
    room = shard_bytes
    for piece in pieces:
        if files[-1] and piece.num_bytes > room:
            files.append([])
            room = shard_bytes
        files[-1].append(piece)
        room -= piece.num_bytes
    return files


def write_files(
    folder: Path, files: Iterable[tuple[str, Sequence[Piece]]], values: Iterator[np.ndarray]
) -> list[Shard]:
    """Writes files of these names; `values` yields the elements of all pieces in order, a piece in any slices."""
    shards = [_write_file(folder / name, pieces, values) for name, pieces in files]
    assert not any(value.size for value in values), "values that belong to no tensor"
    return shards


def _write_file(path: Path, pieces: Sequence[Piece], values: Iterator[np.ndarray]) -> Shard:
    header, crc, left = _header(pieces), 0, sum(piece.num_bytes for piece in pieces)
    num_bytes = len(header) + left
    with open(path, "xb") as file:
        file.write(header)
        while left:
            data = np.ascontiguousarray(next(values)).reshape(-1).view(np.uint8).data
            crc = zlib.crc32(data, crc)
            file.write(data)
            left -= len(data)
            assert left >= 0, f"{path} gets more than was planned"
            del data  # before the next value is made
    return Shard(path.name, num_bytes, zlib.crc32(header, crc))


def _header(pieces: Sequence[Piece]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        assert piece.name not in entries, f"tensor name {piece.name} is taken"
        start, end = end, end + piece.num_bytes
        entries[piece.name] = {"dtype": file_name(piece.dtype), "shape": piece.shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def files_bytes(files: Iterable[Sequence[Piece]]) -> int:
    """Bytes of the files that write_files makes."""
    return sum(len(_header(pieces)) + sum(piece.num_bytes for piece in pieces) for pieces in files)


def verify(folder: Path, shard: Shard) -> dict[str, Stored]:
    """Checks size and checksum of a file; its tensors by name. DataError says what is wrong."""
    path = folder / shard.name
    with reading(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != shard.num_bytes:
            raise DataError(f"{path} has {size} bytes instead of {shard.num_bytes}")
        length, crc = file.read(8), 0
        header = length + file.read(min(int.from_bytes(length, "little"), size))
        while data := file.read(READ_BYTES):
            crc = zlib.crc32(data, crc)
    if zlib.crc32(header, crc) != shard.crc32:
        raise DataError(f"{path} is corrupt: its checksum is not the one it was written with")
    return tensors_of(path)


def tensors_of(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by name, in the file's order; DataError if it is not one."""
    try:
        with safe_open(path, framework="numpy"):  # which validates the header
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} is not a valid safetensors file: {error}{_pointer_hint(path)}") from None
    header.pop("__metadata__", None)
    return {
        name: Stored(path, tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _pointer_hint(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            pointer = file.read(20).startswith(b"version https://git-")
    except OSError:
        return ""
    return " (it is a Git LFS pointer: run `git lfs pull` in its folder)" if pointer else ""


def read_tensor(stored: Stored) -> np.ndarray:
    """One tensor of one of our dtypes, in memory of its own."""
    dtype, count = DTYPES[OUR_NAMES[stored.dtype]], math.prod(stored.shape)
    with reading(stored.path):
        data = np.fromfile(stored.path, np.uint8, count * dtype.itemsize, offset=stored.start)
    if data.size != count * dtype.itemsize:
        raise DataError(f"{stored.path} ends within a tensor")
    return data.view(dtype).reshape(stored.shape)
