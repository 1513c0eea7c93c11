"""`llmq.load`: a model to read with, which gives logits, log p, hidden states, text, and its weights."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from llmq.backends import open_backend
from llmq.engine.advice import Limits, refuse_if_too_large
from llmq.engine.reading import ModelReader
from llmq.errors import UsageError
from llmq.generation.weights import ModelWeights
from llmq.hardware import device as hardware
from llmq.model.optimizer import Hyperparameters
from llmq.plan.memory import Memory
from llmq.plan.precision import Precision
from llmq.plan.reading import plan_reading
from llmq.plan.spec import Spec
from llmq.tensor import IGNORED

if TYPE_CHECKING:
    from llmq.generation.prompts import Answer


def load(
    model: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    batch_size: int = 8,
    seq_len: int = 2048,
    *,
    base_dtype: str | None = None,
    revision: str | None = None,
) -> LoadedModel:
    """The model of a folder or a name on the Hub, with an adapter in PEFT's format.

    It computes in `dtype` (None: bf16 on a GPU, fp32 on the CPU), `batch_size` rows of at most `seq_len` tokens at a
    time. A warning says where an adapter's base is another than it was trained on. LlmqError for what cannot be read,
    and MemoryLimitError for what does not fit.
    """
    if dtype not in (None, "bf16", "fp32"):
        raise UsageError(f"dtype is {dtype!r}: give bf16 or fp32")
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device is {device!r}: give auto, cpu or cuda")
    if batch_size < 1 or seq_len < 1:
        raise UsageError(f"batch_size is {batch_size} and seq_len {seq_len}: use 1 or more")
    found = ModelWeights.find(
        os.fspath(model),
        adapter=None if adapter is None else os.fspath(adapter),
        base_dtype=base_dtype,
        revision=revision,
    )
    for note in found.notes:
        warnings.warn(note, stacklevel=2)
    return LoadedModel(found, dtype, device, batch_size, seq_len)


class LoadedModel:
    """A model on a device. Tokens are (T,) or (B,T) whole numbers: NumPy arrays, lists, or what has `__dlpack__`.

    Results are arrays of the device, NumPy's or CuPy's: copies, or with `copy=False` views that are read-only on the
    CPU and valid until the next call, which only tokens of one batch can have.
    """

    def __init__(self, weights: ModelWeights, dtype: str | None, device: str, batch_size: int, seq_len: int) -> None:
        self._weights, self.config = weights, weights.config
        where = hardware.pick(device)
        self.device, self.dtype = where.kind, dtype or ("bf16" if where.kind == "cuda" else "fp32")
        self.batch_size, self.seq_len = batch_size, min(seq_len, self.config.max_position)
        self._virtual = weights.adapters.num_virtual
        about = Precision(self.dtype, self.dtype, m=self.dtype, v=self.dtype, master=self.dtype, grad=self.dtype)
        sizes = (batch_size, self.seq_len + self._virtual)
        spec = Spec(self.config, about, Memory(), Hyperparameters(), *sizes, adapters=weights.adapters)
        backend = open_backend(where.kind)
        plan = plan_reading(spec, backend.scratch_bytes)
        refuse_if_too_large(plan, Limits(hardware.memory_bytes(where)[1]))
        self._reader = ModelReader(plan, backend, weights.values()(plan.rows))

    def logits(self, tokens: Any, *, copy: bool = True) -> Any:
        """Logits (T,V) or (B,T,V) of the next token after each of `tokens`, in the model's dtype."""
        given = _on_host(tokens)
        ids, found = self._ids("tokens", given), []
        for rows in self._batches(ids, 1, copy=copy):
            logits = self._reader.logits(self._padded(ids[rows], 1))[None, :, : self.config.vocab_size]
            found.append(self._taken(logits, ids[rows], copy=copy))
        return _joined(found, given)

    def score(self, tokens: Any, targets: Any = None, *, copy: bool = True) -> Any:
        """log p of each target (T,) or (B,T) after `tokens`, in fp32; 0 where a target is -100.

        `targets` are of the shape of the tokens (None: the token after each, and none after the last). Logits exist
        for a part of the tokens at a time.
        """
        given = _on_host(tokens)
        ids = self._ids("tokens", given)
        after = np.concatenate([ids[:, 1:], np.full((len(ids), 1), IGNORED, np.int32)], axis=1)
        goals = after if targets is None else self._ids("targets", targets, or_ignored=True)
        if goals.shape != ids.shape:
            raise UsageError(f"targets are {goals.shape}, and tokens {ids.shape}: give one for each token")
        found = []
        for rows in self._batches(ids, self.batch_size, copy=copy):
            about = (self._padded(ids[rows], self.batch_size), self._padded(goals[rows], self.batch_size, IGNORED))
            losses = self._reader.score(*about)
            losses *= -1
            found.append(self._taken(losses, ids[rows], copy=copy))
        return _joined(found, given)

    def hidden(self, tokens: Any, *, copy: bool = True) -> Any:
        """What the head reads (T,C) or (B,T,C): the last hidden state, after the last norm, in the model's dtype."""
        given = _on_host(tokens)
        ids, found = self._ids("tokens", given), []
        for rows in self._batches(ids, self.batch_size, copy=copy):
            states = self._reader.hidden(self._padded(ids[rows], self.batch_size))
            found.append(self._taken(states, ids[rows], copy=copy))
        return _joined(found, given)

    def loss(self, rows: Sequence[Sequence[int] | Mapping[str, Any]]) -> float:
        """The mean of -log p over the trained tokens of rows, each a document: lists of token ids, or dicts of
        `input_ids` and `labels`, which are the tokens themselves or -100. NaN without trained tokens."""
        total, count = 0.0, 0
        for start in range(0, len(rows), self.batch_size):
            pairs = [self._labelled(row) for row in rows[start : start + self.batch_size]]
            shape = (len(pairs), max(len(ids) for ids, _ in pairs))
            tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED)
            for index, (ids, labels) in enumerate(pairs):
                tokens[index, : len(ids)], targets[index, : len(ids) - 1] = ids, labels[1:]
            total -= float(self.score(tokens, targets).sum())
            count += int((targets != IGNORED).sum())
        return total / count if count else float("nan")

    def generate(self, prompts: object, **settings: Any) -> list[Answer] | Iterator[Answer]:
        """Answers as those of `llmq.generate`, which see; the model is loaded once more for it."""
        from llmq.generation.text import write

        adapter = {} if self._weights.adapter is None else {"adapter": str(self._weights.adapter.folder)}
        about = {**adapter, "device": self.device, "dtype": self.dtype, **settings}
        return write(self._weights.source.place, prompts, **about)

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor by its name in files, those of the adapter among them, as it is held (copies, on the host)."""
        return self._reader.parameters()

    def _labelled(self, row: Sequence[int] | Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens (T,) of a row, and its labels: the tokens that are trained, else -100. UsageError."""
        ids, labels = (row["input_ids"], row.get("labels")) if isinstance(row, Mapping) else (row, None)
        ((tokens,), goals) = (
            self._ids("tokens", ids),
            self._ids("labels", ids if labels is None else labels, or_ignored=True),
        )
        if goals.shape != (1, len(tokens)):
            raise UsageError(f"labels are {goals[0].shape}, and tokens {tokens.shape}: give one for each token")
        return tokens, goals[0]

    def _ids(self, name: str, values: Any, *, or_ignored: bool = False) -> np.ndarray:
        """Tokens as (B,T). UsageError for other shapes, types, lengths and ids."""
        array = _on_host(values)
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.size:
            raise UsageError(f"{name} are {array.shape} of {array.dtype}: give whole numbers, (T,) or (B,T)")
        ids = np.atleast_2d(array)
        if ids.shape[1] > self.seq_len:
            fix = f"load it with seq_len={ids.shape[1]}" if ids.shape[1] <= self.config.max_position else "use fewer"
            raise UsageError(f"{name} have {ids.shape[1]} in a row, and the model was loaded for {self.seq_len}: {fix}")
        wrong = ((ids >= self.config.vocab_size) | (ids < 0)) & ~(or_ignored & (ids == IGNORED))
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise UsageError(
                f"{name}: number {column} of row {row} is {ids[row, column]}, and the vocabulary has ids 0 to "
                f"{self.config.vocab_size - 1}"
            )
        return ids.astype(np.int32)

    def _padded(self, ids: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
        """Rows of tokens as `size` rows of the plan, after the virtual tokens."""
        whole = np.full((size, self.seq_len + self._virtual), fill, np.int32)
        whole[: len(ids), self._virtual : self._virtual + ids.shape[1]] = ids
        return whole

    def _batches(self, ids: np.ndarray, size: int, *, copy: bool) -> Iterator[slice]:
        """The rows that are read together. UsageError for a view of more than one batch."""
        if not copy and len(ids) > size:
            raise UsageError(f"copy=False is for one batch, and these are {len(ids)} rows in batches of {size}")
        return (slice(start, start + size) for start in range(0, len(ids), size))

    def _taken(self, found: Any, ids: np.ndarray, *, copy: bool) -> Any:
        """The results of the rows of a batch, without padding."""
        part = found[: len(ids), self._virtual : self._virtual + ids.shape[1]]
        if copy:
            return part.copy()
        if isinstance(part, np.ndarray):
            part = part.view()
            part.flags.writeable = False
        return part


def _joined(parts: Sequence[Any], given: np.ndarray) -> Any:
    """Results of batches as one, of the rank of the tokens that were given."""
    whole = parts[0]
    if len(parts) > 1:
        arrays: Any = np if isinstance(whole, np.ndarray) else import_module("cupy")
        whole = arrays.concatenate(parts)
    return whole[0] if given.ndim == 1 else whole


def _on_host(values: Any) -> np.ndarray:
    """An array of the host with these values; what is on a GPU is copied."""
    if hasattr(values, "__cuda_array_interface__"):
        return np.asarray(import_module("cupy").asnumpy(values))
    try:
        if hasattr(values, "__dlpack__") and not isinstance(values, np.ndarray):
            return np.from_dlpack(values)
        return np.asarray(values)
    except (ValueError, TypeError, BufferError) as error:  # rows of several lengths
        raise UsageError(f"these are no tokens: {error}") from None
