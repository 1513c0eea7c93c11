"""What an export takes over from the multimodal folder that its language model is in: tensors as they are, file to file
by pieces, and the files of what prepares images. They are read again when the model is written: the folder must stay.

A folder's own names of tensors may be older than those of transformers' modules, and are kept.
"""

import math
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llmq.errors import DataError
from llmq.files.tensor_files import Piece, Stored, file_name, raw_bytes, stored_tensors
from llmq.model.multimodal import INSIDE
from llmq.row import Row
from llmq.tensor import DTYPES

HEAD = "lm_head.weight"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_OLDER = (("language_model.model.", "language_model.lm_head."), ("model.", "lm_head."))
_NUMPY = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float64", "bool")
_DTYPES = {file_name(dtype): dtype for dtype in (*DTYPES.values(), *map(np.dtype, _NUMPY))}


@dataclass(frozen=True)
class Spelling:
    """How a folder's names of tensors begin, with what stands for that in ours."""

    begins: tuple[tuple[str, str], ...] = ()

    def ours(self, name: str) -> str:
        """Our name of a tensor of the folder."""
        found = (ours + name.removeprefix(theirs) for theirs, ours in self.begins if name.startswith(theirs))
        return next(found, name)

    def theirs(self, name: str) -> str:
        """The folder's name of a tensor of a language model."""
        found = (theirs + name.removeprefix(ours) for theirs, ours in self.begins if name.startswith(ours))
        return next(found, name)


def spelling_of(names: Collection[str], embedding: str) -> Spelling:
    """That of a folder, whose `embedding` has this name here. Models without their head, and GPT-2 as it is published,
    lack the first part of names."""
    prefix, _, bare = embedding.partition(".")
    if bare in names:
        return Spelling((("", f"{prefix}."),))
    if is_inside(embedding):
        for inside, head in _OLDER:
            if inside + embedding.removeprefix(INSIDE) in names:
                return Spelling(((inside, INSIDE), (head, "lm_head.")))
    return Spelling()


def is_inside(name: str) -> bool:
    """Whether a tensor is one of a language model in a multimodal one."""
    return name.startswith(INSIDE)


@dataclass(frozen=True)
class Carried:
    """Tensors of a folder by their names there, and files; `spelling` is for those of the language model."""

    folder: Path = Path()
    spelling: Spelling = field(default_factory=Spelling)
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    def pieces(self) -> list[Piece]:
        """The tensors, to be written."""
        return [Piece(name, tensor.shape, _DTYPES[tensor.dtype]) for name, tensor in self.tensors.items()]

    def check(self) -> int:
        """Bytes of the files. DataError unless everything is where it was."""
        try:
            found = stored_tensors(self.folder) if self.tensors else {}
            changed = [name for name, tensor in self.tensors.items() if found.get(name) != tensor]
            why = f"{changed[0]} is no more what it was" if changed else ""
            num_bytes = sum(path.stat().st_size for path in self.files)
        except (DataError, OSError) as error:
            why = str(error)
        if why:
            raise DataError(
                f"{self.folder} has the parts of the model that are not trained, which the exported one needs: {why}. "
                "Put the folder back as it was when the run began, and use --continue"
            )
        return num_bytes

    def slices(self) -> Iterator[np.ndarray]:
        """The bytes of the tensors in order."""
        for tensor in self.tensors.values():
            yield from raw_bytes(tensor, math.prod(tensor.shape) * _DTYPES[tensor.dtype].itemsize)

    def copy_files(self, target: Path) -> None:
        """Copies the files."""
        for path in self.files:
            shutil.copyfile(path, target / path.name)


NOTHING = Carried()


def carried_from(folder: Path | None, rows: Sequence[Row]) -> Carried:
    """What lies beside the language model of `rows` in a folder. DataError for a type of numbers that is not known."""
    embedding = rows[0].parts[0].name
    if folder is None or not is_inside(embedding):
        return NOTHING
    stored = stored_tensors(folder)
    spelling = spelling_of(stored, embedding)
    ours = {name: spelling.ours(name) for name in stored}
    beside = {name: stored[name] for name, own in ours.items() if not is_inside(own) and own != HEAD}
    if unknown := [f"{name} is stored as {one.dtype}" for name, one in beside.items() if one.dtype not in _DTYPES]:
        raise DataError(f"{folder} has tensors that cannot be copied: {unknown[0]}; known are {', '.join(_DTYPES)}")
    files = (folder / name for name in PROCESSOR_FILES)
    return Carried(folder, spelling, beside, tuple(path for path in files if path.is_file()))
