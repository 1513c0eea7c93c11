"""What a checkpoint consists of: its manifest, which alone says that the folder around it is complete.

It says the step, the number of the save, options and progress (`state`), metrics, size and SHA-256 of each file, and
each tensor of the whole run by name, with its shape before any sharding and the slices that make it up: in which file,
at which byte, from which index on, of which shape. It carries a checksum of itself.

A tensor is named and shaped as the run has it, not as a writer held it: how many ranks wrote a checkpoint does not
matter to those that read it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

import llmq
from llmq.disk import new_file, reading, write_all
from llmq.errors import DataError, LlmqError, UsageError
from llmq.files.tensor_files import OUR_NAMES, Shard, Stored, read_rows, read_tensor
from llmq.redact import redacted_in
from llmq.tensor import DTYPES

SCHEMA = 2
MANIFEST = "manifest.json"
FOLDER_NAME = re.compile(r"step-([0-9]{8,18})")
PLAIN_NAME = r"^[A-Za-z0-9_-]{1,200}\.safetensors$"  # in the manifest's own folder, and nowhere else

Count = Annotated[int, Field(ge=0, strict=True)]
Box = tuple[Count, ...]


@dataclass(frozen=True)
class Placed:
    """A slice of a tensor in a file: bytes from `at` on hold the indices from `start` on, of this `shape`."""

    file: Annotated[str, Field(pattern=PLAIN_NAME)]
    at: Count
    start: Box
    shape: Box


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of the run: its dtype as safetensors names it, its shape, and the slices that make it up."""

    dtype: str
    shape: Box
    slices: tuple[Placed, ...]


@dataclass(frozen=True)
class CheckpointManifest:
    """A complete checkpoint. `save` counts the saves of its folder: the newest checkpoint has the highest."""

    step: Count
    save: Count
    files: tuple[Shard, ...]
    tensors: dict[str, WholeTensor]
    state: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """ValueError unless slices lie within their files and tensors, and those of a tensor fill it exactly once."""
        sizes = {shard.name: shard.num_bytes for shard in self.files}
        if len(sizes) != len(self.files):
            raise ValueError("two files have one name")
        if foreign := [name for name in sizes if not re.fullmatch(PLAIN_NAME, name)]:
            raise ValueError(f"{foreign[0]!r} is not the name of a safetensors file in that folder")
        for name, whole in self.tensors.items():
            if whole.dtype not in OUR_NAMES:
                raise ValueError(f"{name} has the dtype {whole.dtype!r}, which is not known")
            itemsize, filled = DTYPES[OUR_NAMES[whole.dtype]].itemsize, 0
            for number, part in enumerate(whole.slices):
                ends = [at + count for at, count in zip(part.start, part.shape, strict=True)]
                if any(end > size for end, size in zip(ends, whole.shape, strict=True)):
                    raise ValueError(f"a slice of {name} is not within its shape {list(whole.shape)}")
                if part.at + math.prod(part.shape) * itemsize > sizes.get(part.file, -1):
                    raise ValueError(f"a slice of {name} is not within its file {part.file}")
                if any(_overlap(part, other) for other in whole.slices[:number]):
                    raise ValueError(f"two slices of {name} overlap")
                filled += math.prod(part.shape)
            if filled != math.prod(whole.shape) or not whole.slices:
                raise ValueError(f"the slices of {name} do not fill its shape {list(whole.shape)}")

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return sum(shard.num_bytes for shard in self.files)


@dataclass(frozen=True)
class Reader:
    """Reads tensors of one checkpoint by name.

    Each is in memory of its own, or with `memory` (bytes), which is as large as the largest, valid until the next one
    is read. Memory that was used before is twice as fast to fill: the system has no pages to find and to clear.
    """

    path: Path
    tensors: Mapping[str, WholeTensor]
    memory: np.ndarray | None = None

    def __call__(self, name: str, start: Box | None = None, shape: Box | None = None) -> np.ndarray:
        """A tensor, or of it the indices from `start` on, of this `shape`, wherever its slices begin and end."""
        if name not in self.tensors:
            raise DataError(f"the checkpoint {self.path} has no tensor {name}: it was saved by another model or setup")
        whole = self.tensors[name]
        start, shape = start or (0,) * len(whole.shape), whole.shape if shape is None else shape
        if len(whole.slices) == 1 and shape == whole.shape:
            return read_tensor(self._stored(whole, whole.slices[0]), self.memory)
        value = np.empty(shape, DTYPES[OUR_NAMES[whole.dtype]])
        for part in whole.slices:
            low = [max(a, b) for a, b in zip(start, part.start, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(start, shape, part.start, part.shape, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                rows = read_rows(self._stored(whole, part), low[0] - part.start[0], high[0] - part.start[0])
                inner = (slice(None), *_places(low, high, part.start)[1:])
                value[_places(low, high, start)] = rows[inner]
        return value

    def in_one_memory(self) -> Reader:
        """One whose tensors take turns in the same memory."""
        sizes = (math.prod(whole.shape) * DTYPES[OUR_NAMES[whole.dtype]].itemsize for whole in self.tensors.values())
        return replace(self, memory=np.empty(max(sizes, default=0), np.uint8))

    def _stored(self, whole: WholeTensor, part: Placed) -> Stored:
        return Stored(self.path / part.file, part.shape, whole.dtype, part.at)


def _places(low: list[int], high: list[int], start: Box) -> tuple[slice, ...]:
    """Indices low to high of a tensor, in an array that begins at `start` of it."""
    return tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))


def found(folder: Path) -> dict[int, Path]:
    """Checkpoints in a folder by step, complete by their names."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return {}
    return {int(match[1]): path for path in paths if (match := FOLDER_NAME.fullmatch(path.name)) and path.is_dir()}


def sound(path: Path) -> CheckpointManifest | None:
    """The manifest of a checkpoint, or None if that is damaged at first sight."""
    with suppress(DataError):
        return read_manifest(path)
    return None


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Writes it into the folder of a checkpoint whose other files are complete. OSError."""
    record = {"schema": SCHEMA, "version": llmq.__version__, **asdict(manifest), "state": redacted_in(manifest.state)}
    record["sha256"] = hashlib.sha256(canonical(record)).hexdigest()
    with new_file(folder / MANIFEST) as file:
        write_all(file, json.dumps(record, indent=1, allow_nan=False).encode("ascii") + b"\n")


def read_manifest(path: Path) -> CheckpointManifest:
    """The manifest of a checkpoint, with every file there in its size; DataError says what is damaged.

    UsageError for one of a later release, which is not damaged: nothing falls back from it or deletes it.
    """
    file = path / MANIFEST
    try:
        record = json.loads(file.read_bytes())
        if record.pop("sha256") != hashlib.sha256(canonical(record)).hexdigest():
            raise ValueError("its checksum is not the one it was written with")
        if record["schema"] != SCHEMA:
            raise UsageError(f"{file} has schema {record['schema']}, this llmq reads {SCHEMA}: update llmq")
        manifest = _MANIFEST.validate_python(record)
    except OSError as error:
        raise DataError(f"the checkpoint {path} cannot be read: {error.strerror or error}: {file}") from error
    except ValidationError as error:
        raise DataError(f"{file} is corrupt: {error.errors()[0]['msg']} at {error.errors()[0]['loc']}") from error
    except LlmqError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} is corrupt: {error}") from error
    for shard in manifest.files:
        with reading(path / shard.name):
            size = os.stat(path / shard.name).st_size
        if size != shard.num_bytes:
            raise DataError(f"{path / shard.name} has {size} bytes instead of {shard.num_bytes}")
    return manifest


def canonical(value: object) -> bytes:
    """One spelling of a JSON value, whatever the order of its keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _overlap(one: Placed, other: Placed) -> bool:
    return all(
        a < b + m and b < a + n for a, n, b, m in zip(one.start, one.shape, other.start, other.shape, strict=True)
    )


_MANIFEST = TypeAdapter(CheckpointManifest)
