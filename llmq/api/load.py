"""`llmq.load`: a model to read with, which gives logits, log p, hidden states, text, and its weights."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np

from llmq.api.tokens import TokenRules
from llmq.backends.opening import open_backend
from llmq.engine.advice import Limits, lacking, refuse_if_too_large
from llmq.engine.reading import ModelReader
from llmq.errors import MemoryLimitError, UsageError
from llmq.generation.weights import ModelWeights
from llmq.hardware import device as hardware
from llmq.model.optimizer import Hyperparameters
from llmq.options.adapters import BaseDtype
from llmq.plan.memory import Memory
from llmq.plan.plan import Plan
from llmq.plan.precision import Precision
from llmq.plan.reading import plan_reading
from llmq.plan.spec import Spec
from llmq.tensor import IGNORED

if TYPE_CHECKING:
    from llmq.generation.prompts import Answer

Computed = Literal["bf16", "fp32"]
FEWER, SHORTEST = 4, 32  # rows are padded to at most FEWER times their tokens, or to SHORTEST


def load(
    model: str | os.PathLike[str],
    adapter: str | os.PathLike[str] | None = None,
    dtype: Computed | None = None,
    device: str = "auto",
    batch_size: int = 8,
    seq_len: int = 2048,
    *,
    base_dtype: BaseDtype | None = None,
    revision: str | None = None,
) -> LoadedModel:
    """The model of a folder or a name on the Hub, with an adapter in PEFT's format.

    It computes in `dtype` (None: bf16 on a GPU, fp32 on the CPU) on a `device` (auto, cuda, cpu, or the backend of a
    plug-in), `batch_size` rows of at most `seq_len` tokens at a time. A warning says where an adapter's base is another
    than it was trained on. LlmqError for what cannot be read, and MemoryLimitError for what does not fit.
    """
    if not isinstance(model, str | os.PathLike):
        raise UsageError(f"the model is {model!r}: give the path of a folder, or a name")
    for name, value, known in (("dtype", dtype, get_args(Computed)), ("base_dtype", base_dtype, get_args(BaseDtype))):
        if value not in (None, *known):
            raise UsageError(f"{name} is {value!r}: give one of {', '.join(known)}")
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
        about = Precision(self.dtype, self.dtype, m=self.dtype, v=self.dtype, master=self.dtype, grad=self.dtype)
        num_virtual = weights.adapters.num_virtual
        sizes = (batch_size, self.seq_len + num_virtual)
        spec = Spec(self.config, about, Memory(), Hyperparameters(), *sizes, adapters=weights.adapters)
        backend = open_backend(where.backend)
        plan = plan_reading(spec, backend.scratch_bytes)
        self._where = where
        refuse_if_too_large(plan, Limits(hardware.memory_bytes(where)[1]))
        self._reader = ModelReader(plan, backend, num_virtual)
        self._reader.load(weights.values()(plan.rows))
        self._readers = {self.seq_len: self._reader}  # by the most tokens of a row
        cell = import_module("cupy").empty(1, np.int64) if where.kind == "cuda" else None
        self._rules = TokenRules(self.config.vocab_size, self.seq_len, self.config.max_position, cell)

    def logits(self, tokens: Any, *, copy: bool = True) -> Any:
        """Logits (T,V) or (B,T,V) of the next token after each of `tokens`, in the model's dtype."""
        return self._read("logits", tokens, copy=copy)

    def score(self, tokens: Any, targets: Any = None, *, copy: bool = True) -> Any:
        """log p of each target (T,) or (B,T) after `tokens`, in fp32; 0 where a target is -100.

        `targets` are of the shape of the tokens (None: the token after each, and none after the last). Logits exist
        for a part of the tokens at a time.
        """
        return self._read("score", tokens, targets, copy=copy)

    def score_and_hits(self, tokens: Any, targets: Any) -> tuple[Any, Any]:
        """The score of at most a batch of rows (B,T), and 1 where a target is the most likely token, the first of those
        that are alike, else 0: (B,T) int32."""
        ids, goals = self._rules.rows("tokens", tokens)[0], self._rules.rows("targets", targets, or_ignored=True)[0]
        return self._reader_of(ids).scored_rows(ids, goals)

    def hidden(self, tokens: Any, *, copy: bool = True) -> Any:
        """What the head reads (T,C) or (B,T,C): the last hidden state, after the last norm, in the model's dtype."""
        return self._read("hidden", tokens, copy=copy)

    def loss(self, rows: Sequence[Sequence[int] | Mapping[str, Any]]) -> float:
        """The mean of -log p over the trained tokens of rows, each a document: lists of token ids, or dicts of
        `input_ids` and `labels`, which are the tokens themselves or -100. NaN without trained tokens."""
        total, count = 0.0, 0
        for tokens, targets in self._rules.labelled(rows, self.batch_size):
            total -= float(self._reader_of(tokens).view_rows("score", tokens, targets).sum(dtype=np.float64))
            count += int((targets != IGNORED).sum())
        return total / count if count else float("nan")

    @overload
    def generate(self, prompts: object, *, stream: Literal[False] = False, **settings: Any) -> list[Answer]: ...
    @overload
    def generate(self, prompts: object, *, stream: Literal[True], **settings: Any) -> Iterator[Answer]: ...
    def generate(self, prompts: object, **settings: Any) -> list[Answer] | Iterator[Answer]:
        """Answers as those of `llmq.generate`, which see, with the weights that are loaded; `settings` are others than
        those of the model. MemoryLimitError where its cache does not fit beside them."""
        from llmq.generation.text import Loaded, written

        own: dict[str, Any] = {"model": self._weights.source.name, "device": self.device, "dtype": self.dtype}
        if given := sorted({*own, "adapter", "base_dtype", "revision", "from_scratch"} & settings.keys()):
            raise UsageError(f"generate was given {', '.join(given)}, which the model was loaded with: use llmq.load")
        return written(prompts, loaded=Loaded(self._weights, self._reader), **own, **settings)

    def parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor by its name in files, those of the adapter among them, as it is held (copies, on the host)."""
        return self._reader.parameters()

    def _read(self, name: str, tokens: Any, targets: Any = None, *, copy: bool) -> Any:
        """What the plan's program of that name leaves of tokens. UsageError for a view of more than a batch."""
        ids, is_one = self._rules.rows("tokens", tokens)
        goals = None if targets is None else self._rules.rows("targets", targets, or_ignored=True)[0]
        if goals is not None and goals.shape != ids.shape:
            raise UsageError(f"targets are {goals.shape}, and tokens {ids.shape}: give one for each token")
        reader = self._reader_of(ids)
        if copy:
            found = reader.read_rows(name, ids, goals)
        elif len(ids) > (size := reader.batch_size(name)):
            raise UsageError(f"copy=False is for one batch, and these are {len(ids)} rows in batches of {size}")
        else:
            found = reader.view_rows(name, ids, goals)
            if isinstance(found, np.ndarray):
                found.flags.writeable = False
        return found[0] if is_one else found

    def _reader_of(self, ids: Any) -> ModelReader:
        """What reads rows as long as these (B,T): made when the first come, where there is memory for it."""
        length = self.seq_len
        while length >= FEWER * max(ids.shape[1], SHORTEST):
            length = -(-length // FEWER)
        if length not in self._readers:
            try:
                self._readers[length] = self._reader.shorter(length, self._check)
            except MemoryLimitError:
                self._readers[length] = self._reader
        return self._readers[length]

    def _check(self, plan: Plan) -> None:
        """MemoryLimitError where a plan beside the first one does not fit."""
        if lack := lacking(plan, Limits(hardware.memory_bytes(self._where)[1])):
            raise MemoryLimitError(lack)
