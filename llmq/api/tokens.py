"""Token ids as callers give them: lists, and arrays of NumPy, CuPy, torch, JAX, checked where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from llmq.data.rows.given import on_host
from llmq.errors import UsageError
from llmq.tensor import IGNORED

CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged of DLPack
NONE = 2**62  # past every place of an array
CHECK = """
    long long value = id;
    if ((value < 0 || value >= num_ids) && !(or_ignored && value == ignored)) atomicMin(&first[0], (long long)i);
"""


@dataclass(frozen=True)
class TokenRules:
    """What token ids may be: below `vocab_size`, and at most `seq_len` in a row, of which the model has
    `max_position`.

    `cell` (1,) int64 is on the GPU of a model that is there: ids on that GPU stay there, others go to the host.
    """

    vocab_size: int
    seq_len: int
    max_position: int
    cell: Any

    def rows(self, name: str, values: Any, *, or_ignored: bool = False) -> tuple[Any, bool]:
        """Ids (B,T), and whether they were given as one row (T,). UsageError for other shapes, types, lengths, ids."""
        array = self._array(name, values)
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.size:
            said = f"{array.shape} of {array.dtype}" if array.dtype.kind != "O" else f"a {type(values).__name__}"
            raise UsageError(f"{name} are {said}: give whole numbers, (T,) or (B,T)")
        is_one = array.ndim == 1
        ids = array[None] if is_one else array
        if ids.shape[1] > self.seq_len:
            fix = f"load it with seq_len={ids.shape[1]}" if ids.shape[1] <= self.max_position else "use fewer"
            raise UsageError(f"{name} have {ids.shape[1]} in a row, and the model was loaded for {self.seq_len}: {fix}")
        if (place := self._first_wrong(ids, or_ignored=or_ignored)) is not None:
            row, column = divmod(place, ids.shape[1])
            where = "" if is_one else f" of row {row}"
            raise UsageError(
                f"{name}: number {column}{where} is {int(ids[row, column])}, and the vocabulary has ids 0 to "
                f"{self.vocab_size - 1}"
            )
        return ids, is_one

    def labelled(self, rows: Any, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Batches of rows, each (T,) or `input_ids` and `labels` (T,), as tokens (B,T) and targets (B,T): the labels of
        the tokens after them, or -100. UsageError."""
        if isinstance(rows, Mapping) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            raise UsageError(f"rows are a {type(rows).__name__}: give a list of them")
        if not len(rows):
            raise UsageError("rows are empty: give at least one")
        for start in range(0, len(rows), batch_size):
            pairs = [self._labelled(number, rows[number]) for number in range(start, len(rows))[:batch_size]]
            shape = (len(pairs), max(len(ids) for ids, _ in pairs))
            tokens, targets = np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
            for index, (ids, labels) in enumerate(pairs):
                tokens[index, : len(ids)], targets[index, : len(ids) - 1] = ids, labels[1:]
            yield tokens, targets

    def _labelled(self, number: int, row: Any) -> tuple[np.ndarray, np.ndarray]:
        """The tokens (T,) of a row, and their labels."""
        given = row if isinstance(row, Mapping) else {"input_ids": row}
        if "input_ids" not in given:
            raise UsageError(f"row {number} has {', '.join(given) or 'nothing'}: give input_ids, and labels if need be")
        found = {}
        for key in ("input_ids", "labels")[: 1 + ("labels" in given)]:
            ids, is_one = self.rows(f"{key} of row {number}", given[key], or_ignored=key == "labels")
            if not is_one:
                raise UsageError(f"{key} of row {number} are {ids.shape}: give (T,)")
            found[key] = on_host(ids[0])
        tokens, labels = found["input_ids"], found.get("labels", found["input_ids"])
        if labels.shape != tokens.shape:
            raise UsageError(f"row {number} has {len(labels)} labels of {len(tokens)} tokens: give one for each")
        return tokens, labels

    def _first_wrong(self, ids: Any, *, or_ignored: bool) -> int | None:
        """The first place, in C order, of an id that is not in the vocabulary; None: all are."""
        if isinstance(ids, np.ndarray):
            wrong = ((ids >= self.vocab_size) | (ids < 0)) & ~(or_ignored & (ids == IGNORED))
            return int(wrong.argmax()) if wrong.any() else None
        self.cell.fill(NONE)
        _check()(ids, self.vocab_size, or_ignored, IGNORED, self.cell)
        place = int(self.cell.item())
        return None if place == NONE else place

    def _array(self, name: str, values: Any) -> Any:
        """An array of these values: CuPy's of those that are on the GPU and stay there, else NumPy's."""
        if isinstance(values, np.ndarray):
            return values
        try:
            if self.cell is not None and (found := _on_gpu(values)) is not None:
                return found
            return on_host(values)
        except (ValueError, TypeError, BufferError) as error:  # rows of several lengths
            raise UsageError(f"{name} are no array ({error}): give rows of one length, or one at a time") from None


def _on_gpu(values: Any) -> Any:
    """The values as they lie on the current GPU; None for those that lie elsewhere."""
    cupy = import_module("cupy")
    if not hasattr(values, "__dlpack_device__"):
        return cupy.asarray(values) if hasattr(values, "__cuda_array_interface__") else None
    kind, index = values.__dlpack_device__()
    if kind not in CUDA or index != cupy.cuda.runtime.getDevice():
        return None
    return values if isinstance(values, cupy.ndarray) else cupy.from_dlpack(values)


@cache
def _check() -> Any:
    names = "T id, int64 num_ids, bool or_ignored, int64 ignored"
    return import_module("cupy").ElementwiseKernel(names, "raw int64 first", CHECK, "first_wrong")
