"""Data that the caller holds, put where llmq-train reads it: rows and tokens into files of the cache, named by content,
so that they are tokenized once, and every rank and a resumed run find them; streams into a table of this process.

    list of dicts or texts, anything with len() and []   rows; a text is a row with a text
    pyarrow tables, Hugging Face datasets, data frames   rows
    token arrays (n,) int                                tokens, as in a token file
    token arrays (N,T) int, or {"input_ids": (N,T), "labels": (N,T)}   rows of tokens
    iterators, generators, other iterables               a stream of rows, read while it is trained on; needs `steps`.
                                                         What is not trained on, as `val`, is read to its end
    text or a path                                       what --data names
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from llmq.data.rows.held_rows import PREFIX, HeldRows, holding
from llmq.data.tokens.cache import content_hash, key_of
from llmq.data.tokens.token_file import TokenWriter
from llmq.disk import cache_folder, storage
from llmq.errors import DataError, UsageError

LARGEST_ID = 2**31 - 1
KINDS = "a list of dicts or texts, a table or data set, an array of tokens, an iterable of rows, or a name"


@dataclass(frozen=True)
class PlacedData:
    """Where data is for a run: the `options` that name it, and what it reads of this process while it runs."""

    options: Mapping[str, Any]
    streams: Mapping[str, HeldRows]
    files: Mapping[str, str]  # by argument

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, the streams can be read by their names, and errors say the argument in place of its file."""
        with ExitStack() as stack:
            for name, rows in self.streams.items():
                stack.enter_context(holding(name, rows))
            stack.enter_context(called(self.files))
            yield


@contextmanager
def called(files: Mapping[str, str]) -> Iterator[None]:
    """Within, errors of data call these files by their names."""
    try:
        yield
    except DataError as error:
        for name, file in files.items():
            error.args = (str(error.args[0]).replace(file, name), *error.args[1:])
        raise


def placed(train: Any, val: Any = None) -> PlacedData:
    """Places data to train on. UsageError and DataError name the argument, and the row, that cannot be used."""
    given = {name: _known(name, value) for name, value in {"train": train, "val": val}.items() if value is not None}
    kinds = {name: kind for name, (kind, _) in given.items()}
    if len(kinds) > 1 and not ({*kinds.values()} <= {"rows", "table", "stream"} or {*kinds.values()} == {"tokens"}):
        said = " and ".join(f"{name} is {_WORDS[kind]}" for name, kind in kinds.items())
        raise UsageError(f"{said}: give both as rows or both as arrays of tokens (n,); beside names, use eval_fraction")
    kind, value = given["train"]
    if kind == "name":
        return PlacedData({"data": [os.fspath(value)]}, {}, {})
    if kind == "stream":
        if val is train and iter(val) is val:
            raise UsageError("train and val are one iterator, which gives its rows once: give two, or a list")
        del given["train"]
    files = _in_cache({name: (_SPLITS[name], *one) for name, one in _writers(given).items()}) if given else {}
    if kind == "stream":
        own = {f"{PREFIX}train": HeldRows(value, "train", files.get("val"))}
        return PlacedData({"data": [f"{PREFIX}train"], "streaming": True}, own, files)
    if kind == "tokens":
        return PlacedData({key: [files[name]] for name, key in _TOKEN_OPTIONS.items() if name in files}, {}, files)
    return PlacedData({"data": [str(Path(files["train"]).parent) if "val" in files else files["train"]]}, {}, files)


def placed_beside(name: str, value: Any) -> tuple[str, bool]:
    """Data that is not trained on, the argument `name`: the file or name to find it by, and whether it is a token file.

    UsageError and DataError as `placed`.
    """
    kind, found = _known(name, value)
    if kind == "name":
        return os.fspath(found), False
    (file,) = _in_cache({key: ("train", *one) for key, one in _writers({name: (kind, found)}).items()}).values()
    return file, kind == "tokens"


Write = Callable[[Path], None]
_WORDS = {"rows": "rows", "table": "a table", "tokens": "tokens", "stream": "a stream", "name": "a name"}
_SPLITS = {"train": "train", "val": "validation"}  # file names, by argument
_TOKEN_OPTIONS = {"train": "train_file", "val": "eval_file"}


def _known(name: str, value: Any) -> tuple[str, Any]:
    """What kind of data a value is, and the value as that: rows, table, tokens, stream or name."""
    if isinstance(value, (str, os.PathLike)):
        return "name", value
    if hasattr(value, "__arrow_c_stream__") or _is_of("pandas", value, "to_dict"):
        return "table", _table(name, value)
    if _is_of("datasets", value, "with_format", "__len__") and not isinstance(value, Mapping):
        return "table", value.with_format("arrow")[:]
    if isinstance(value, Mapping):
        return "rows", _columns(name, value)
    if hasattr(value, "__array__") or hasattr(value, "__dlpack__"):
        array = on_host(value)
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
            raise UsageError(
                f"{name} is an array {array.shape} of {array.dtype}: tokens are whole numbers, (n,) or (rows, tokens)"
            )
        return ("tokens", array) if array.ndim == 1 else ("rows", _columns(name, {"input_ids": array}))
    if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        return "rows", (value[index] for index in range(len(value)))
    if inspect.isgenerator(value) and inspect.getgeneratorstate(value) != inspect.GEN_CREATED:
        raise UsageError(f"{name} is a generator that was read before, and cannot begin again: give a new one")
    if isinstance(value, (set, frozenset)):
        raise UsageError(f"{name} is {_kind(value)}, whose order differs from process to process: give a sorted list")
    if isinstance(value, Iterable):
        return "stream", value
    raise UsageError(f"{name} is {_kind(value)}: give {KINDS}")


def _is_of(library: str, value: Any, *attributes: str) -> bool:
    """Whether this is an object of a library, which need not be installed, with these attributes."""
    modules = (kind.__module__.partition(".")[0] for kind in type(value).__mro__)
    return library in modules and all(hasattr(value, name) for name in attributes)


def _table(name: str, value: Any) -> Any:
    """A pyarrow table of an Arrow stream, or of a data frame of pandas (before 2.2 without one), less its index."""
    import pyarrow

    try:
        is_frame = _is_of("pandas", value, "columns")
        return pyarrow.Table.from_pandas(value, preserve_index=False) if is_frame else pyarrow.table(value)
    except pyarrow.ArrowException as error:
        raise DataError(f"{name} is a {type(value).__name__} that is no table ({error}): give {KINDS}") from None


def on_host(values: Any) -> np.ndarray:
    """An array, or what else has numbers, as NumPy's on the host; what is on a GPU is copied. ValueError, TypeError and
    BufferError for what is none."""
    if hasattr(values, "__cuda_array_interface__"):
        return np.asarray(import_module("cupy").asnumpy(values))
    is_other = hasattr(values, "__dlpack__") and not isinstance(values, np.ndarray)
    return np.from_dlpack(values) if is_other else np.asarray(values)


def _writers(given: Mapping[str, tuple[str, Any]]) -> dict[str, tuple[str, Write]]:
    """The suffix of the file for each argument, and what writes it; all are files of one kind."""
    found: dict[str, tuple[str, Write]] = {}
    kinds = {kind for kind, _ in given.values()}
    for name, (kind, value) in given.items():
        if kind == "tokens":
            found[name] = (".bin", _tokens_writer(name, value))
        elif {"rows", "stream"} & kinds:
            rows = value if kind != "table" else (row for batch in value.to_batches() for row in batch.to_pylist())
            found[name] = (".jsonl", _rows_writer(name, rows))
        else:
            found[name] = (".parquet", _table_writer(name, value))
    return found


def _columns(name: str, columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of arrays (N,T) by the names of their columns. UsageError for arrays of other shapes."""
    fix = "give input_ids (rows, tokens), and labels of the same shape; or a list of dicts"
    if "input_ids" not in columns:
        raise UsageError(f"{name} has {', '.join(map(str, columns)) or 'nothing'}: {fix}")
    try:
        arrays = {key: on_host(value) for key, value in columns.items()}
    except (ValueError, TypeError, BufferError) as error:
        raise UsageError(f"{name} has no arrays ({error}): {fix}, with rows of any lengths") from None
    shapes = {array.shape for array in arrays.values()}
    if (
        len(shapes) > 1
        or any(len(shape) != 2 for shape in shapes)
        or any(a.dtype.kind not in "iu" for a in arrays.values())
    ):
        said = ", ".join(f"{key} {array.shape} of {array.dtype}" for key, array in arrays.items())
        raise UsageError(f"{name} has {said}: {fix}. Tokens are whole numbers")
    return (
        {key: row.tolist() for key, row in zip(arrays, rows, strict=True)}
        for rows in zip(*arrays.values(), strict=True)
    )


def _rows_writer(name: str, rows: Iterable[Any]) -> Write:
    def write(path: Path) -> None:
        count, is_text = 0, None
        with path.open("wb") as file:
            for count, row in enumerate(_read(name, rows), 1):
                is_text = isinstance(row, str) if is_text is None else is_text
                if isinstance(row, str) is not is_text:
                    said = f"row {count} is {_kind(row)}, and those before are {'texts' if is_text else 'dicts'}"
                    raise DataError(f"{name}: {said}: give all as dicts, or all as texts")
                file.write(_as_json(name, count, row) + b"\n")
        if not count:
            raise DataError(f"{name} has no rows: give at least one")

    return write


def _read(name: str, rows: Iterable[Any]) -> Iterator[Any]:
    """The rows. DataError where the caller's files fail, which are not those of the cache."""
    try:
        yield from rows
    except OSError as error:
        raise DataError(f"{name}: a row cannot be read: {error}") from error


def _as_json(name: str, number: int, row: Any) -> bytes:
    """A row as a line of JSON: a mapping, or a text. DataError."""
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, Mapping):
        raise DataError(f"{name}: row {number} is {_kind(row)}: give a dict with fields, such as input_ids, or a text")
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: row {number} is nothing that JSON has: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(_kind(value))


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _table_writer(name: str, table: Any) -> Write:
    def write(path: Path) -> None:
        import pyarrow.parquet

        if not table.num_rows:
            raise DataError(f"{name} has no rows: give at least one")
        pyarrow.parquet.write_table(table, path, row_group_size=1 << 16)

    return write


def _tokens_writer(name: str, ids: np.ndarray) -> Write:
    def write(path: Path) -> None:
        if not ids.size:
            raise DataError(f"{name} has no tokens: give at least two")
        if ids.min() < 0:
            raise DataError(f"{name}: token {int(np.argmax(ids < 0))} has the id {int(ids.min())}: ids count from 0")
        if ids.max() > LARGEST_ID:
            raise DataError(f"{name}: token {int(np.argmax(ids))} has the id {int(ids.max())}: use less than 2**31")
        with TokenWriter(path, vocab_size=int(ids.max()) + 1) as file:
            file.append(ids)

    return write


def _in_cache(writers: Mapping[str, tuple[str, str, Write]]) -> dict[str, str]:
    """Files of the cache by argument, of these names and suffixes, in a folder that their content names.
    StorageError."""
    root = cache_folder("rows")
    with storage(root, advice="choose a folder on another disk with LLMQ_CACHE_DIR"):
        root.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(dir=root, prefix="making-"))
        try:
            names = {name: stem + suffix for name, (stem, suffix, _) in writers.items()}
            for name, (*_, write) in writers.items():
                write(making / names[name])
            folder = root / key_of({file: content_hash(making / file) for file in names.values()})
            try:
                os.rename(making, folder)
            except OSError:
                if not folder.is_dir():  # made before, perhaps by another process just now
                    raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return {name: str(folder / file) for name, file in names.items()}
