"""The safetensors files of a model folder: which there are, and what is in them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from llmq.disk import reading
from llmq.errors import DataError
from llmq.files.tensor_files import OUR_NAMES, Stored, tensors_of
from llmq.model.config import DEQUANTIZE, TORCH_NAMES, read_json
from llmq.tensor import DTYPES

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FILE_DTYPES = {file: name for file, name in OUR_NAMES.items() if name in TORCH_NAMES}
SAMPLES, SAMPLE_BYTES = 16, 4096  # of a tensor's bytes in a model's fingerprint
CHUNK_BYTES = 64 << 20  # what is read, compared or converted at a time
SHARD_NAME = re.compile(r"[^/\\\x00-\x1f\ud800-\udfff]+\.safetensors")
LONGEST_NAME = 255  # bytes of UTF-8 that a file system takes
_CONVERT = (
    'convert it once with transformers: python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('SOURCE').save_pretrained('NEW_FOLDER')\""
)


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
            tensors = tensors_of(path)
        except DataError as error:
            problems.append(str(error))
            continue
        problems += [f"{path}: {name} is in {found[name].path.name} too" for name in tensors if name in found]
        found |= tensors
    if problems:
        raise DataError("\n".join(problems))
    return found


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
