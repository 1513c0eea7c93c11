"""Safetensors files: written as a stream, tensor by tensor, with a checksum; those of a model folder; one tensor of it.

The library's writer wants all tensors of a file in memory at once, which is 5 GB for an export. Here the header is
written first, since names, shapes and dtypes are known before the first value. Headers are read and validated by the
library; it cannot read fp8 into NumPy, so bytes are read here.

A file's checksum is its SHA-256, as `sha256sum` prints it. One core hashes 1.3 to 2 GB/s, less than a good disk takes:
a second thread hashes what the first one writes, and what is in memory is written several files at a time.
"""

import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

import ml_dtypes  # noqa: F401 - safetensors < 0.6 finds NumPy's bfloat16 only once this is imported
import numpy as np
from safetensors import SafetensorError, safe_open

from llmq.disk import new_file, reading, write_all
from llmq.errors import DataError
from llmq.model.config import TORCH_NAMES, dequantize, read_json
from llmq.screen import Report, unreported
from llmq.tensor import DTYPES

BLOCK_BYTES = 8 << 20  # read or written at a time
AT_ONCE = 4  # files that are written or verified at the same time
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SAMPLES, SAMPLE_BYTES = 16, 4096  # of a tensor's bytes in a model's fingerprint
CHUNK_BYTES = 64 << 20  # what is read, compared or converted at a time
SHARD_NAME = re.compile(r"[^/\\\x00-\x1f\ud800-\udfff]+\.safetensors")
LONGEST_NAME = 255  # bytes of UTF-8 that a file system takes
_CONVERT = (
    'convert it once with transformers: python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('SOURCE').save_pretrained('NEW_FOLDER')\""
)
Moved = Callable[[int], None]  # takes the bytes just written or read, from any thread; what it raises ends the work


def file_name(dtype: np.dtype) -> str:
    """What safetensors calls a dtype: BF16, F8_E4M3, I32, U8."""
    name = dtype.name.upper().removesuffix("FN")
    return name.replace("BFLOAT", "BF").replace("FLOAT", "F").replace("UINT", "U").replace("INT", "I")


OUR_NAMES = {file_name(dtype): name for name, dtype in DTYPES.items()}
FILE_DTYPES = {file: name for file, name in OUR_NAMES.items() if name in TORCH_NAMES}


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
    """One finished file: its name in the folder, its size, and its SHA-256."""

    name: str
    num_bytes: int
    sha256: str


class ByteCount:
    """Counts bytes that several threads move, and reports how many of `total` are done."""

    def __init__(self, total: int = 0, report: Report = unreported) -> None:
        self.done, self._total, self._report = 0, total, report
        self._lock = threading.Lock()

    def moved(self, num_bytes: int) -> None:
        """Counts and reports."""
        with self._lock:
            self.done += num_bytes
            self._report(self.done, self._total)


def unwatched(num_bytes: int) -> None:
    """The Moved of work whose progress does not matter."""


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
    folder: Path,
    files: Iterable[tuple[str, Sequence[Piece]]],
    values: Iterator[np.ndarray],
    moved: Moved = unwatched,
    *,
    in_memory: bool = False,
) -> list[Shard]:
    """Writes files of these names; `values` yields the elements of all pieces in order, a piece in any slices.

    Where they are `in_memory`, one value a piece, several files are written at a time.
    """
    with ThreadPoolExecutor(AT_ONCE, "llmq-write") as pool:
        try:
            if in_memory:
                own = [(folder / name, pieces, list(islice(values, len(pieces)))) for name, pieces in files]
                jobs = [pool.submit(_write_file, path, pieces, iter(each), moved) for path, pieces, each in own]
                shards = [job.result() for job in jobs]
            else:
                shards = [_write_file(folder / name, pieces, values, moved) for name, pieces in files]
        finally:
            pool.shutdown(cancel_futures=True)
    assert not any(value.size for value in values), "values that belong to no tensor"
    return shards


def _write_file(path: Path, pieces: Sequence[Piece], values: Iterator[np.ndarray], moved: Moved) -> Shard:
    """Writes one file, durably; a second thread hashes it meanwhile. OSError."""
    header, left = _header(pieces), sum(piece.num_bytes for piece in pieces)
    num_bytes, digest = len(header) + left, hashlib.sha256(header)
    with ThreadPoolExecutor(1, "llmq-hash") as second, new_file(path) as file:
        write_all(file, header)
        while left:
            data = np.ascontiguousarray(next(values)).reshape(-1).view(np.uint8).data
            hashed = second.submit(digest.update, data)
            for start in range(0, len(data), BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES]
                write_all(file, block)
                moved(len(block))
            hashed.result()
            left -= len(data)
            assert left >= 0, f"{path} gets more than was planned"
            del data, hashed  # before the next value is made
    return Shard(path.name, num_bytes, digest.hexdigest())


def _header(pieces: Sequence[Piece]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        assert piece.name not in entries, f"tensor name {piece.name} is taken"
        start, end = end, end + piece.num_bytes
        entries[piece.name] = {"dtype": file_name(piece.dtype), "shape": piece.shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(len(text) + -len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def places(pieces: Sequence[Piece]) -> list[int]:
    """The byte of their file at which each of the pieces begins."""
    return list(accumulate((piece.num_bytes for piece in pieces), initial=len(_header(pieces))))[: len(pieces)]


def files_bytes(files: Iterable[Sequence[Piece]]) -> int:
    """Bytes of the files that write_files makes."""
    return sum(len(_header(pieces)) + sum(piece.num_bytes for piece in pieces) for pieces in files)


def verify(folder: Path, shards: Sequence[Shard], moved: Moved = unwatched) -> None:
    """Checks size and checksum of files, several at a time. DataError names every one that is damaged, and how."""
    with ThreadPoolExecutor(AT_ONCE, "llmq-verify") as pool:
        checks = [pool.submit(_verify_file, folder / shard.name, shard, moved) for shard in shards]
        problems = [str(error) for check in checks if isinstance(error := check.exception(), DataError)]
    if problems:
        raise DataError("\n".join(problems))
    for check in checks:
        check.result()


def _verify_file(path: Path, shard: Shard, moved: Moved) -> None:
    with reading(path), open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size != shard.num_bytes:
            raise DataError(f"{path} has {size} bytes instead of {shard.num_bytes}")
        digest, memory = hashlib.sha256(), memoryview(bytearray(BLOCK_BYTES))
        while count := file.readinto(memory):
            digest.update(memory[:count])
            moved(count)
        if digest.hexdigest() != shard.sha256:
            raise DataError(f"{path} is corrupt: its checksum is not the one it was written with")


def tensors_of(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by name, in the file's order; DataError if it is not one."""
    try:
        with safe_open(path, framework="numpy"):  # which validates the header
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        hint = ""
        with suppress(OSError), open(path, "rb") as file:
            if file.read(20).startswith(b"version https://git-"):
                hint = " (it is a Git LFS pointer: run `git lfs pull` in its folder)"
        raise DataError(f"{path} is not a valid safetensors file: {error}{hint}") from None
    header.pop("__metadata__", None)
    return {
        name: Stored(path, tuple(entry["shape"]), entry["dtype"], 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def read_tensor(stored: Stored, memory: np.ndarray | None = None) -> np.ndarray:
    """One tensor of one of our dtypes, in memory of its own, or at the start of `memory` (bytes)."""
    rows = stored.shape[0] if stored.shape else 1
    return read_rows(stored, 0, rows, memory).reshape(stored.shape)


def read_rows(stored: Stored, start: int, stop: int, memory: np.ndarray | None = None) -> np.ndarray:
    """Entries start to stop of the first axis, in memory as above; a scalar is one entry."""
    dtype, axes = DTYPES[OUR_NAMES[stored.dtype]], stored.shape[1:]
    entry = math.prod(axes) * dtype.itemsize
    num_bytes = (stop - start) * entry
    data = np.empty(num_bytes, np.uint8) if memory is None else memory[:num_bytes]
    with reading(stored.path):
        _read_at(stored.path, stored.start + start * entry, data.data)
    return data.view(dtype).reshape(stop - start, *axes)


def raw_bytes(stored: Stored, num_bytes: int) -> Iterator[np.ndarray]:
    """The bytes of a tensor of any dtype, in pieces."""
    for start in range(0, num_bytes, CHUNK_BYTES):
        data = np.empty(min(CHUNK_BYTES, num_bytes - start), np.uint8)
        with reading(stored.path):
            _read_at(stored.path, stored.start + start, data.data)
        yield data


def _read_at(path: Path, at: int, data: memoryview) -> None:
    """Fills `data` with the bytes of a file from `at` on, several blocks at a time."""

    def fill(start: int) -> None:
        block = data[start : start + BLOCK_BYTES]
        with open(path, "rb", buffering=0) as file:
            file.seek(at + start)
            while block:
                count = file.readinto(block)
                if not count:
                    raise DataError(f"{path} ends within a tensor")
                block = block[count:]

    starts = range(0, len(data), BLOCK_BYTES)
    if len(starts) < 2:
        fill(0)
        return
    with ThreadPoolExecutor(min(AT_ONCE, len(starts)), "llmq-read") as pool:
        for _ in pool.map(fill, starts):
            pass


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder; DataError says what is there instead, and the way out."""
    folder = Path(folder)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        names = index_files(folder / INDEX)
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise DataError(f"{folder} lacks {len(absent)} of {len(names)} weight files: {', '.join(absent)}")
        return [folder / name for name in names]
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    raise DataError(f"{folder} has no {WEIGHTS} or {INDEX}{other_weights(p.name for p in folder.iterdir())}")


def index_files(path: Path) -> list[str]:
    """The file names in a safetensors index, each a plain name in its own folder; DataError otherwise."""
    weight_map = read_json(path).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    for name in names:
        if not isinstance(name, str) or not SHARD_NAME.fullmatch(name) or len(name.encode()) > LONGEST_NAME:
            raise DataError(f"{path}: {name!r} in weight_map is not the name of a safetensors file in that folder")
    if not names:
        raise DataError(f"{path} has no weight_map, or an empty one")
    return sorted(set(names))


def other_weights(names: Iterable[str]) -> str:
    """The message for a model without usable safetensors, by its other files."""
    names = sorted(names)
    for pattern, way_out in (
        (r"adapter_model\..*", "it is an adapter: give the model that it belongs to, and the adapter with --adapter"),
        (r".*\.gguf", f"GGUF files are not read: {dequantize(None)}"),
        (r"model-.*\.safetensors", f"it has shards without {INDEX}: fetch the index too"),
        (r"consolidated.*\.(safetensors|pth)", "it has weights with the publisher's own names: use its -hf variant"),
        (r".*\.(bin|pt|pth|ckpt|h5|msgpack)", f"pickled weights are not read, for they can run code: {_CONVERT}"),
    ):
        if found := [name for name in names if re.fullmatch(pattern, name)]:
            return f", but {', '.join(found[:3])}{' ...' if len(found) > 3 else ''}: {way_out}"
    return ": use --from-scratch to train without weights"


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a model folder by name, from the file headers; DataError where a file is absent or corrupt."""
    found: dict[str, Stored] = {}
    problems = []
    for path in weight_files(folder):
        try:
            tensors = tensors_of(path)
        except DataError as error:
            problems.append(str(error))
            continue
        problems += [f"{path}: {name} is in {found[name].path.name} too" for name in tensors if name in found]
        found |= tensors
    if problems:
        raise DataError("\n".join(problems))
    return found


def by_kind(problems: Iterable[str], differing: re.Pattern[str]) -> list[str]:
    """The first problem of each kind, those that differ in this alone, with the number of the others."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(differing.sub("", problem), []).append(problem)
    return [f"{one[0]} (and {len(one) - 1} more like it)" if one[1:] else one[0] for one in kinds.values()]


def stored_dtype(folder: Path) -> str:
    """Our name of the storage type that most elements of the weights have: fp32, fp16 or bf16."""
    totals: dict[str, int] = {}
    for tensor in stored_tensors(folder).values():
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + math.prod(tensor.shape)
    return FILE_DTYPES.get(max(totals, key=lambda name: totals[name], default="F32"), "fp32")


def fingerprint(stored: Mapping[str, Stored]) -> str:
    """What tells models apart whose tensors have the same names: a SHA-256 over names, dtypes, shapes, and of each
    tensor up to SAMPLES pieces of SAMPLE_BYTES, the first and the last among them.

    Of 15 GB some 20 MiB are read; training changes nearly every number of a tensor. How tensors are cut into files
    does not count. DataError.
    """
    found = hashlib.sha256()
    for name in sorted(stored):
        tensor = stored[name]
        found.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        last = math.prod(tensor.shape) * DTYPES[OUR_NAMES[tensor.dtype]].itemsize - SAMPLE_BYTES
        with reading(tensor.path), open(tensor.path, "rb") as file:
            for start in sorted({max(0, last) * piece // (SAMPLES - 1) for piece in range(SAMPLES)}):
                file.seek(tensor.start + start)
                found.update(file.read(min(SAMPLE_BYTES, last + SAMPLE_BYTES)))
    return found.hexdigest()


def chunks(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop) ranges of the first axis, each of about CHUNK_BYTES in fp32."""
    step = max(1, CHUNK_BYTES // (4 * max(1, math.prod(shape[1:]))))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def norms_of(weight: np.ndarray) -> np.ndarray:
    """The norm of each row of a matrix, in f32."""
    found = np.empty(len(weight), np.float32)
    for start, stop in chunks(weight.shape):
        found[start:stop] = np.sqrt(np.sum(np.square(weight[start:stop].astype(np.float64)), axis=1))
    return found
