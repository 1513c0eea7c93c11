"""The safetensors files of a model folder: which there are, what is in them, and writing new ones.

Headers are read and validated by the safetensors library. Files are written here, as a stream: the library's writer
wants all tensors of a file in memory at once, which for a shard is 5 GB.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401 - safetensors < 0.6 finds NumPy's bfloat16 only once this is imported
import numpy as np
from safetensors import SafetensorError, safe_open

from llmq.errors import DataError
from llmq.model.config import DEQUANTIZE, read_json
from llmq.tensor import DTYPES

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FILE_DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
FILE_NAMES = {short: name for name, short in FILE_DTYPES.items()}
CHUNK_BYTES = 64 << 20  # what is read, compared or converted at a time
SHARD_NAME = re.compile(r"[^/\\\0]+\.safetensors")
_CONVERT = (
    'convert it once with transformers: python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('SOURCE').save_pretrained('NEW_FOLDER')\""
)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: where, its shape, and its storage type as safetensors names it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


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
        if not isinstance(name, str) or not SHARD_NAME.fullmatch(name):
            raise DataError(f"{path}: {name!r} in weight_map is not the name of a safetensors file in that folder")
    if not names:
        raise DataError(f"{path} has no weight_map, or an empty one")
    return sorted(set(names))


def other_weights(names: Iterable[str]) -> str:
    """What to say of a model without usable safetensors, judged by its other files."""
    names = sorted(names)
    for pattern, way_out in (
        (r"adapter_model\..*", "it is a LoRA adapter: merge it into its base model first (peft's merge_and_unload)"),
        (r".*\.gguf", f"GGUF files are not read: {DEQUANTIZE}"),
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
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    view = file.get_slice(name)
                    if name in found:
                        problems.append(f"{path}: {name} is in {found[name].path.name} too")
                    found[name] = Stored(path, tuple(view.get_shape()), view.get_dtype())
        except (SafetensorError, OSError, ValueError) as error:
            problems.append(f"{path} is not a valid safetensors file: {error}{_pointer_hint(path)}")
    if problems:
        raise DataError("\n".join(problems))
    return found


def _pointer_hint(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            pointer = file.read(20).startswith(b"version https://git-")
    except OSError:
        return ""
    return " (it is a Git LFS pointer: run `git lfs pull` in its folder)" if pointer else ""


def stored_dtype(folder: Path) -> str:
    """Our name of the storage type that most elements of the weights have: fp32, fp16 or bf16."""
    totals: dict[str, int] = {}
    for tensor in stored_tensors(folder).values():
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + int(np.prod(tensor.shape, dtype=np.int64))
    return FILE_DTYPES.get(max(totals, key=lambda name: totals[name], default="F32"), "fp32")


def chunks(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop) ranges of the first axis, each of about CHUNK_BYTES in fp32."""
    step = max(1, CHUNK_BYTES // (4 * max(1, int(np.prod(shape[1:], dtype=np.int64)))))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


@dataclass(frozen=True)
class Piece:
    """A tensor to be written: its name and shape."""

    name: str
    shape: tuple[int, ...]

    def num_bytes(self, dtype: str) -> int:
        return DTYPES[dtype].itemsize * int(np.prod(self.shape, dtype=np.int64))


def shards(pieces: Iterable[Piece], dtype: str, shard_bytes: int) -> list[list[Piece]]:
    """Pieces in order, cut into files of at most `shard_bytes` (or one piece, where that is larger)."""
    files: list[list[Piece]] = [[]]
    room = shard_bytes
    for piece in pieces:
        if files[-1] and piece.num_bytes(dtype) > room:
            files.append([])
            room = shard_bytes
        files[-1].append(piece)
        room -= piece.num_bytes(dtype)
    return files


def write_file(path: Path, pieces: Sequence[Piece], dtype: str, values: Iterator[np.ndarray]) -> None:
    """Writes one safetensors file and syncs it. `values` yields the pieces' elements in order, in slices of `dtype`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        start, end = end, end + piece.num_bytes(dtype)
        header[piece.name] = {"dtype": FILE_NAMES[dtype], "shape": piece.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in values:
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        assert file.tell() == 8 + len(text) + end, f"{path} got {file.tell()} bytes, {8 + len(text) + end} were planned"
        file.flush()
        os.fsync(file.fileno())
