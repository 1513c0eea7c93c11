"""Hugging Face model folders: weights in, tensor by tensor, and a complete folder out.

Reading checks every name, shape and type before the first value is touched. An export appears whole (llmq/disk.py): a
failed or killed one leaves what was there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmq import disk
from llmq.errors import DataError, StorageError, UsageError
from llmq.files import tensor_files
from llmq.files.carried import HEAD, NOTHING, PROCESSOR_FILES, Carried, is_inside, spelling_of
from llmq.files.tensor_files import Piece, Stored, by_kind, cut, write_files
from llmq.model.config import TORCH_NAMES, VISION_TOWER, ModelConfig, dequantize, read_json, to_hf
from llmq.redact import redacted_in
from llmq.row import Row
from llmq.tensor import DTYPES

if TYPE_CHECKING:
    from llmq.options.run import ExportOptions

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SHARD_BYTES = 5_000_000_000
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "tekken.json", "chat_template.jinja", "chat_template.json"),
)
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FOLDER = "additional_chat_templates"  # named chat templates of transformers >= 4.51, one file each

# Buffers that old releases of transformers stored with the weights; they follow from the config.
_BUFFER = re.compile(r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.masked_bias|\.h\.\d+\.attn\.bias)$")
_LAYER = re.compile(r"((?<=\.layers\.)|(?<=\.h\.))\d+")
_QUANTIZED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|weight_scale(_inv)?|weight_packed|input_scale|SCB|absmax|quant_map|quant_state.*)$"
)
_WRITTEN = re.compile(
    r"config\.json|llmq_(base|merged)\.json|adapter_config\.json|adapter_model\.safetensors|generation_config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)
_storage = partial(disk.storage, failed="the model cannot be written", advice="choose another --out-dir")


def model_tensors(folder: Path, rows: Sequence[Row]) -> dict[str, Stored]:
    """Every tensor of a model folder by the name that `rows` have for it, the embedding's first."""
    stored = tensor_files.stored_tensors(folder)
    spelling = spelling_of(stored, rows[0].parts[0].name)
    return {spelling.ours(name): tensor for name, tensor in stored.items()}


def checked_tensors(folder: Path, rows: Sequence[Row]) -> dict[str, Stored]:
    """The tensors of a model folder by name, checked to be those of `rows`.

    DataError lists everything missing, extra, misshapen or of a wrong type, and a tied head unlike the embedding.
    """
    stored = model_tensors(folder, rows)
    wanted = _shapes(rows)
    embedding = next(iter(wanted))
    if quantized := [name for name in stored if _QUANTIZED.search(name)]:
        raise DataError(f"{folder} is quantized (it has {quantized[0]}): {dequantize(None)}")
    named = {name: tensor for name, tensor in stored.items() if not _BUFFER.search(name)}
    if is_inside(embedding):
        named = {name: tensor for name, tensor in named.items() if is_inside(name) or name == HEAD}
        if not named:
            raise DataError(
                f"{folder} has no tensor of a language model, only {', '.join([*stored][:3])} ...{VISION_TOWER}"
            )
    tied = HEAD in named and HEAD not in wanted and embedding in named
    extra = [name for name in named if name not in wanted and not (tied and name == HEAD)]
    problems = [f"missing: {name}" for name in wanted if name not in named]
    problems += [f"not part of this architecture: {name}" for name in extra]
    unfit = []
    for name in (n for n in wanted if n in named):
        tensor = named[name]
        if tensor.shape != wanted[name]:
            unfit.append(f"{name} has shape {list(tensor.shape)}, config.json asks for {list(wanted[name])}")
        if tensor.dtype not in tensor_files.FILE_DTYPES:
            unfit.append(f"{name} is stored as {tensor.dtype}; known are {', '.join(tensor_files.FILE_DTYPES)}")
    if tied and not unfit and not are_equal(named[HEAD], named[embedding]):
        problems.append(f"{HEAD} differs from {embedding}, but config.json has tie_word_embeddings true")
    if problems + unfit:
        listed = "\n".join(f"  - {p}" for p in by_kind(problems + unfit, _LAYER))
        raise DataError(f"{folder} does not fit its config.json:\n{listed}")
    return stored


def are_equal(one: Stored, other: Stored) -> bool:
    """Whether two stored matrices hold the same numbers, compared in slices."""
    if one.shape != other.shape or one.dtype not in tensor_files.FILE_DTYPES:
        return False
    pairs = (
        [tensor_files.read_rows(tensor, *rows).astype(np.float32) for tensor in (one, other)]
        for rows in tensor_files.chunks(one.shape)
    )
    return all(np.array_equal(x, y, equal_nan=True) for x, y in pairs)


def read_rows(stored: Mapping[str, Stored], rows: Iterable[Row]) -> Iterator[tuple[Row, np.ndarray]]:
    """Each of `rows` with its value, one in memory at a time.

    Values have the row's shape (fused, padded rows zero) and the file's dtype (fp32 where the parts of a row differ).
    """
    for row in rows:
        types = {tensor_files.FILE_DTYPES[stored[part.name].dtype] for part in row.parts}
        value = np.zeros(row.part_axes, DTYPES[types.pop() if len(types) == 1 else "fp32"])
        for part in row.parts:
            for start, stop in tensor_files.chunks(stored[part.name].shape):
                part.put(value, tensor_files.read_rows(stored[part.name], start, stop), start)
        yield row, value.reshape(row.shape)


@dataclass(frozen=True)
class Export:
    """A requested export: where, what and how. `check` before training, `write` after it."""

    folder: Path
    config: ModelConfig
    rows: Sequence[Row]
    dtype: str
    tokenizer_folder: Path | None = None
    overwrite: bool = False
    chat_templates: Mapping[str, str] | None = None  # in Jinja by name, in place of all of the tokenizer's
    shard_bytes: int = SHARD_BYTES
    beside: Mapping[str, Any] = field(default_factory=dict)  # contents of more JSON files by name
    carried: Carried = NOTHING  # of a multimodal folder

    @property
    def num_bytes(self) -> int:
        """Of all tensors that are written."""
        return sum(piece.num_bytes for piece in self._all_pieces())

    def _all_pieces(self) -> list[Piece]:
        own = [
            replace(piece, name=self.carried.spelling.theirs(piece.name)) for piece in _pieces(self.rows, self.dtype)
        ]
        return [*own, *self.carried.pieces()]

    def check(self, *, room: bool = True) -> int:
        """Bytes that `write` needs; raises what it would raise, without writing.

        StorageError: a model is there and may not be overwritten, the folder cannot be replaced, or, with `room`, the
        disk is too full. DataError: the source's generation_config.json is corrupt, or what is carried over has gone.
        UsageError: no weight type.
        """
        folder = _resolved(self.folder)
        if self.dtype not in TORCH_NAMES:
            raise UsageError(f"--export-dtype {self.dtype}: known are {', '.join(TORCH_NAMES)}")
        _generation_config(self.tokenizer_folder, {})
        copied = sum(path.stat().st_size for path in tokenizer_files(self.tokenizer_folder)) + self.carried.check()
        needed = self.num_bytes + copied + disk.MIB
        with _storage(folder):
            disk.finish_folder(folder, kept=_is_other)
        refuse_taken(folder, self.overwrite)
        if room:
            disk.check_free_space({"the model": (folder, needed)})
        return needed

    def write(self, read: Callable[[Row], np.ndarray]) -> Path:
        """Writes a complete Hugging Face folder and returns it: configs, weights, tokenizer files byte for byte.

        `read` gives a row's value in its shape (any float dtype; padded rows are left out) and is called once per row,
        in order. A model that is there is replaced only once the new one is complete; files in the folder that are no
        part of a model stay. StorageError where the disk fails; what was there before is then intact.
        """
        folder, needed = finish_model(self.folder), self.check()
        with _storage(folder, needed=needed), disk.whole_folder(folder, kept=_is_other) as new:
            self.write_model(new, read)
            self.carried.copy_files(new)
            for name, contents in self.beside.items():
                write_json(new / name, contents)
            if self.tokenizer_folder is not None:
                _copy_tokenizer(self.tokenizer_folder, new, self.chat_templates)
        return self.folder

    def read_along(self, read: Callable[[Row], np.ndarray]) -> Path:
        """Reads what `write` does on another rank, as rows are made of what all ranks hold; returns the folder."""
        for row in self.rows:
            read(row)
        return self.folder

    def write_model(self, folder: Path, read: Callable[[Row], np.ndarray]) -> None:
        """Weights, in one file or numbered shards with their index, and configs into a new folder."""
        files = cut(self._all_pieces(), self.shard_bytes)
        names = [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
        names = names if len(files) > 1 else [tensor_files.WEIGHTS]
        values = chain(_slices(self.rows, read, self.dtype), self.carried.slices())
        write_files(folder, zip(names, files, strict=True), values)
        if len(files) > 1:
            about = {"total_size": self.num_bytes}
            weight_map = {piece.name: name for name, pieces in zip(names, files, strict=True) for piece in pieces}
            write_json(folder / tensor_files.INDEX, {"metadata": about, "weight_map": weight_map})
        written = to_hf(self.config, self.dtype)
        keys = self.config.family.within.text(written)
        ids = {key: keys.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(folder / "config.json", written)
        write_json(folder / "generation_config.json", _generation_config(self.tokenizer_folder, ids))


def is_of_run(options: ExportOptions, earlier: Mapping[str, Any]) -> bool:
    """Whether a run with the options `earlier` exported to the same folder: a model in it is that run's."""
    return "out_dir" in earlier and _resolved(Path(earlier["out_dir"])) == _resolved(Path(options.out_dir))


def finish_model(folder: Path) -> Path:
    """Completes an export that was cut off: files that stood beside the old model, such as checkpoints, are back."""
    disk.remove_leftovers(folder := _resolved(folder), kept=_is_other)
    return folder


def remove_model(folder: Path) -> bool:
    """Removes the model in a folder, and the folder unless more is in it; whether there was one. StorageError."""
    folder = _resolved(folder)
    with _storage(folder):
        entries = list(folder.iterdir()) if folder.is_dir() else []
        ours = [entry for entry in entries if _is_ours(entry.name)]
        if ours and len(ours) == len(entries):
            disk.remove_folder(folder)
        else:
            for entry in ours:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return bool(ours)


def export_bytes(rows: Sequence[Row], dtype: str) -> int:
    """Bytes of the weights that an export in `dtype` writes."""
    return sum(piece.num_bytes for piece in _pieces(rows, dtype))


def _shapes(rows: Sequence[Row]) -> dict[str, tuple[int, ...]]:
    return {part.name: part.shape(row.part_axes) for row in rows for part in row.parts}


def _pieces(rows: Sequence[Row], dtype: str) -> list[Piece]:
    return [Piece(name, shape, DTYPES[dtype]) for name, shape in _shapes(rows).items()]


def refuse_taken(folder: Path, overwrite: bool) -> None:
    """StorageError unless a model can take this place."""
    folder = _resolved(folder)
    with _storage(folder):
        if folder.exists() and not folder.is_dir():
            raise StorageError(f"{folder} is a file: give another --out-dir")
        if os.path.ismount(folder) or folder == Path.cwd():
            what = "a mount point" if os.path.ismount(folder) else "the current folder"
            raise StorageError(f"{folder} is {what}, which cannot be replaced as a whole: give a folder inside it")
        there = sorted(filter(_is_ours, os.listdir(folder))) if folder.exists() else []
        if there and not overwrite:
            more = " ..." if len(there) > 3 else ""
            raise StorageError(
                f"{folder} already holds a model ({', '.join(there[:3])}{more}): "
                "use another --out-dir, or --overwrite to replace it"
            )
        parent = disk.existing_folder(folder.parent)
        if not disk.takes_files(parent):
            raise StorageError(f"{parent} is not a folder that can be written to: give another --out-dir")


def _copy_tokenizer(folder: Path, target: Path, templates: Mapping[str, str] | None) -> None:
    """Copies a tokenizer's files. `templates` go into tokenizer_config.json, and no template file stays beside it.

    That is the one place which all of transformers 4 and 5 read; a chat_template.jinja would win over it, and 4.49 and
    4.50 read no second template from files.
    """
    for source in tokenizer_files(folder):
        name = source.relative_to(folder)
        if templates is None or not (name.stem == "chat_template" or name.parts[0] == TEMPLATE_FOLDER):
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target / name)
    if templates is not None:
        path = folder / TOKENIZER_CONFIG
        listed = [{"name": name, "template": template} for name, template in templates.items()]
        value = listed[0]["template"] if list(templates) == ["default"] else listed
        write_json(target / TOKENIZER_CONFIG, {**(read_json(path) if path.is_file() else {}), "chat_template": value})


def tokenizer_files(folder: Path | None) -> list[Path]:
    """Tokenizer and chat template files of a folder."""
    if folder is None:
        return []
    templates = sorted((Path(folder) / TEMPLATE_FOLDER).glob("*.jinja"))
    return [path for name in TOKENIZER_FILES if (path := Path(folder) / name).is_file()] + templates


def _generation_config(folder: Path | None, own: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json: the source's values where it has them, else `own`; the end tokens of both."""
    path = Path(folder) / "generation_config.json" if folder is not None else None
    source = read_json(path) if path is not None and path.exists() else {}
    ends = [*_as_list(source.get("eos_token_id")), *_as_list(own.get("eos_token_id"))]
    merged = {**{key: value for key, value in own.items() if value is not None}, **source}
    if ends:
        unique = list(dict.fromkeys(ends))
        merged["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return merged


def end_tokens(config: ModelConfig, folder: Path | None) -> tuple[int, ...]:
    """The tokens that end a text, by config.json and by generation_config.json in `folder`."""
    found = _generation_config(folder, {"eos_token_id": list(config.eos_token_ids)})
    return tuple(_as_list(found.get("eos_token_id")))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _slices(rows: Sequence[Row], read: Callable[[Row], np.ndarray], dtype: str) -> Iterator[np.ndarray]:
    """The elements of all parts in order, in slices of `dtype`, holding one row at a time."""
    for row in rows:
        yield from _row_slices(row, read(row), dtype)


def _row_slices(row: Row, value: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
    assert value.shape == row.shape, f"{row.name} has shape {value.shape}, not {row.shape}"
    for part in row.parts:
        for start, stop in tensor_files.chunks(part.shape(row.part_axes)):
            piece = part.take(value.reshape(row.part_axes), start, stop)
            with np.errstate(over="ignore"):
                stored = piece.astype(DTYPES[dtype], copy=False)
            if dtype == "fp16" and (np.isinf(stored) & ~np.isinf(piece)).any():
                limit = f"{np.abs(piece.astype(np.float32)).max():g}, beyond fp16's 65504"
                raise UsageError(f"{part.name} has a value of magnitude {limit}: use --export-dtype bf16 or fp32")
            yield stored


def write_tensors(path: Path, rows: Sequence[Row], read: Callable[[Row], np.ndarray], dtype: str) -> None:
    """All parts of the rows in one file, in `dtype`."""
    write_files(path.parent, [(path.name, _pieces(rows, dtype))], _slices(rows, read, dtype))


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(redacted_in(content), indent=2) + "\n", encoding="utf-8")


def _resolved(folder: Path) -> Path:
    return Path(os.path.realpath(os.path.expanduser(folder)))


def _is_ours(name: str) -> bool:
    return (
        name in (*TOKENIZER_FILES, *PROCESSOR_FILES) or name == TEMPLATE_FOLDER or _WRITTEN.fullmatch(name) is not None
    )


def _is_other(name: str) -> bool:
    return not _is_ours(name)
