"""Where a model comes from: a folder, the Hub or a preset, with weights read from files or drawn from a seed.

Drawn values are addressed by (seed, row name, element index): each block of BLOCK consecutive elements has its own
Philox stream, so any part of any row can be drawn alone, and shards, orders and padding do not change a value.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmq.errors import DataError, UsageError
from llmq.files import tensor_files
from llmq.files.carried import HEAD
from llmq.files.hub import model_folder, revision_of
from llmq.files.huggingface import ADAPTER_CONFIG, are_equal, checked_tensors, model_tensors, read_rows, tokenizer_files
from llmq.files.tensor_files import Stored
from llmq.hardware.cores import num_cores
from llmq.model.config import ModelConfig, from_folder, read_json
from llmq.model.family_file import read_description
from llmq.model.parameters import EMBED_ROW, HEAD_ROW, parameter_rows, rows_of_file
from llmq.model.presets import HUB_NAMES, is_known, preset, preset_tokenizer
from llmq.row import Row

if TYPE_CHECKING:
    from llmq.options.data import ModelOptions

INIT_STD = 0.02
BLOCK = 1 << 18  # elements drawn from one stream
DRAWN_AHEAD = 1 << 28  # bytes of rows that are drawn while one is used
Values = Callable[[Sequence[Row]], Iterator[tuple[Row, np.ndarray]]]


@dataclass(frozen=True)
class ModelSource:
    """A model to train. `folder` has its files (None: a preset), `tokenizer_folder` its tokenizer, if it has one.

    `tokenizer_asked`: --tokenizer chose that. `preset_tokenizer` is the hub name of a preset's tokenizer, which is
    downloaded only where text is tokenized.
    """

    name: str
    config: ModelConfig
    folder: Path | None
    tokenizer_folder: Path | None
    from_scratch: bool
    init_proj_to_zero: bool
    preset_tokenizer: str | None = None
    tokenizer_asked: bool = False
    revision: str | None = None  # of a model of the Hub, with its commit
    new_tokens: Sequence[Mapping[str, Any]] = ()  # that are added to the tokenizer
    new_rows: range = range(0)  # of the embedding and the head, which begin as the mean of those before
    stored_rows: int = 0  # that the files have of these where there are new ones

    @property
    def required_tokenizer(self) -> Path | None:
        """The folder of the tokenizer that token files must be of; None for a model from scratch, which takes any."""
        return self.tokenizer_folder if self.tokenizer_asked or not self.from_scratch else None

    @property
    def place(self) -> str:
        """The model in a line of the log: its folder or name, with the revision."""
        return self.name + (f" ({self.revision})" if self.revision else "")


def open_source(
    options: ModelOptions,
    say: Callable[[str], None] = lambda text: None,
    num_ids: Callable[[str], int] | None = None,
    *,
    plan_only: bool = False,
    family: Mapping[str, Any] | None = None,
) -> ModelSource:
    """Finds what `--model` names: a local folder, else a preset, else a model of the Hub (downloaded).

    `say` gets notices of the download. `num_ids` counts the ids of a tokenizer. A plan needs no weights of what is a
    preset, too. The `family` that a run which is continued was described by counts where --family is not given.
    """
    source = find_source(
        str(options.model),
        revision=options.revision,
        from_scratch=options.from_scratch or (plan_only and options.model.lower() in HUB_NAMES),
        init_proj_to_zero=options.init_proj_to_zero,
        say=say,
        family=family if options.family is None else read_description(options.family),
    )
    if options.tokenizer is not None:
        folder = model_folder(str(options.tokenizer), kind="tokenizer", say=say)
        source = replace(source, tokenizer_folder=folder, tokenizer_asked=True)
    if options.vocab_size is None:
        return source
    size = options.vocab_size
    if size == "tokenizer":
        if num_ids is None or (name := source.tokenizer_folder or source.preset_tokenizer) is None:
            raise UsageError(
                f"--vocab-size tokenizer: {source.name} has no tokenizer: name one with --tokenizer, or give a number"
            )
        size = num_ids(str(name))
    return replace(source, config=source.config.with_vocabulary(size))


def find_source(
    name: str,
    *,
    revision: str | None = None,
    from_scratch: bool = False,
    init_proj_to_zero: bool = False,
    say: Callable[[str], None] = lambda text: None,
    family: Mapping[str, Any] | None = None,
) -> ModelSource:
    """The model of a name, with its own tokenizer, of a described `family` where that is given; `say` gets a notice of
    a folder that hides a known name, too."""
    is_local = any(mark in name for mark in "/\\~") or os.path.exists(name)
    name = name if is_local or from_scratch else HUB_NAMES.get(name.lower(), name)
    if "/" not in name and not is_local:
        try:
            config = preset(name)
        except UsageError as error:
            raise UsageError(f"--model {name}: no such folder, and {error}; models of the Hub are ORG/NAME") from None
        if not from_scratch:
            raise UsageError(
                f"{name} is a preset, which is a shape without weights: add --from-scratch, "
                "or give a folder or ORG/NAME of the Hub"
            )
        if revision is not None:
            raise UsageError(f"--revision {revision} is for models of the Hub, but {name} is a preset")
        if family is not None:
            raise UsageError(f"--family describes a model's folder, but {name} is a preset: leave it out")
        return ModelSource(name, config, None, None, True, init_proj_to_zero, preset_tokenizer(name))
    local = Path(os.path.expanduser(name))
    if (local / ADAPTER_CONFIG).is_file() and not (local / "config.json").exists():
        base = read_json(local / ADAPTER_CONFIG).get("base_model_name_or_path") or "its base model"
        is_one = f"{local} is an adapter of {base} (it has {ADAPTER_CONFIG}), not a model"
        raise DataError(f"{is_one}: give {base} with --adapter {local}")
    if is_known(name) and local.is_dir():
        hidden = "model of the Hub" if "/" in name else "preset"
        say(f"--model {name} is the folder {local.absolute()}, not the {hidden} of that name")
    read = partial(from_folder, family=family)
    folder = model_folder(name, revision, "config" if from_scratch else "model", say, read)
    config = read(folder)
    keys = config.family.within.text(config.source)
    if not from_scratch and keys.get("dtype") is None and keys.get("torch_dtype") is None:
        config = replace(config, dtype=tensor_files.stored_dtype(folder))
    if not config.family.within.is_all:
        if from_scratch:
            raise UsageError(
                f"--from-scratch is for language models, and {name} is {config.architecture}, whose other parts would "
                "have no weights: leave it out, or name a language model"
            )
        config = replace(
            config, tie_embeddings=keys.get("tie_word_embeddings") is not False and _is_tied(folder, config)
        )
    tokenizer_folder = folder if tokenizer_files(folder) else None
    commit = None if local.is_dir() else revision_of(folder, revision)
    return ModelSource(name, config, folder, tokenizer_folder, from_scratch, init_proj_to_zero, revision=commit)


def _is_tied(folder: Path, config: ModelConfig) -> bool:
    """Whether the head of a multimodal model is its embedding by its files, as transformers 5 takes them."""
    stored = model_tensors(folder, parameter_rows(config))
    embedding = f"{config.family.wiring.names.embed}.weight"
    return HEAD not in stored or (embedding in stored and are_equal(stored[HEAD], stored[embedding]))


def open_parameters(source: ModelSource, seed: int) -> Values:
    """A function that gives each of some rows with its first value: the model's from the source's files, in their
    dtype, and others, or all of a model from scratch, drawn in fp32. Rows of new tokens are the mean of the others.

    Files are checked by this call; see checked_tensors for the errors.
    """
    stored: dict[str, Stored] = {}
    if not source.from_scratch:
        assert source.folder is not None
        held = replace(source.config, vocab_size=source.stored_rows or source.config.vocab_size)
        stored = checked_tensors(source.folder, parameter_rows(held))

    def values(rows: Sequence[Row]) -> Iterator[tuple[Row, np.ndarray]]:
        read = () if source.from_scratch else rows_of_file(rows)
        for row, value in read_rows(stored, read):
            if source.new_rows and row.name in (EMBED_ROW, HEAD_ROW):
                others, new = value[: source.new_rows.start], value[source.new_rows.start : source.new_rows.stop]
                new[...] = others.mean(axis=0, dtype=np.float64)
            yield row, value
        names = {row.name for row in read}
        yield from drawn(source, [row for row in rows if row.name not in names], seed)

    return values


def fingerprint(source: ModelSource) -> str | None:
    """The fingerprint of a source's weights; None for a model from scratch, which its seed says."""
    if source.from_scratch:
        return None
    assert source.folder is not None
    stored = model_tensors(source.folder, rows := parameter_rows(source.config))
    return tensor_files.fingerprint({part.name: stored[part.name] for row in rows for part in row.parts})


def drawn(source: ModelSource, rows: Sequence[Row], seed: int) -> Iterator[tuple[Row, np.ndarray]]:
    """Rows with their initial values in fp32: N(0, 0.02), residual projections scaled by 1/sqrt(2L) (GPT-2) or zero.

    Of adapters, as PEFT draws them: uniform up to 1/sqrt(K) (kaiming), N(0, 1/R) with each part's R (gaussian), or
    N(0, 0.02) (AdaLoRA), of virtual tokens N(0, 1) (unit).
    Padded rows are zero. While the caller uses one row, threads draw the next ones: a core draws 90 million numbers a
    second.
    """
    coming: deque[tuple[Row, np.ndarray, list[Future[None]], int]] = deque()  # with the bytes up to the end of each

    def first() -> tuple[Row, np.ndarray]:
        row, value, drawing, _ = coming.popleft()
        for block in drawing:
            block.result()
        if row.init == "gaussian":
            for part in row.parts:
                value[part.start : part.stop] *= np.float32(1 / (part.stop - part.start))
        return row, value.reshape(row.shape)

    pool, end = ThreadPoolExecutor(num_cores(), "llmq-draw"), 0
    try:
        for row in rows:
            value = np.zeros(row.part_axes, np.float32)
            end += value.nbytes
            coming.append((row, value, [pool.submit(draw) for draw in _draws(source, row, seed, value)], end))
            while end - coming[0][-1] > DRAWN_AHEAD:
                yield first()
        while coming:
            yield first()
    finally:
        pool.shutdown(cancel_futures=True)


def _draws(source: ModelSource, row: Row, seed: int, value: np.ndarray) -> Iterator[Callable[[], None]]:
    """What draws each block of a row's zeros."""
    drawn_rows = value[: row.parts[-1].stop]
    if row.init == "ones":
        drawn_rows[...] = 1
    projection = 0.0 if source.init_proj_to_zero else INIT_STD / math.sqrt(2 * source.config.num_layers)
    scales = {"normal": INIT_STD, "residual": projection, "kaiming": 1 / math.sqrt(row.shape[-1])}
    scale = np.float32(scales.get(row.init, 1.0 if row.init in ("unit", "gaussian") else 0.0))
    flat = drawn_rows.reshape(-1)

    def draw(start: int) -> None:
        block, is_uniform = flat[start : start + BLOCK], row.init == "kaiming"
        np.multiply(drawn_block(seed, row.name, start // BLOCK, block.size, uniform=is_uniform), scale, out=block)

    yield from (partial(draw, start) for start in range(0, flat.size if scale else 0, BLOCK))


def drawn_block(seed: int, name: str, block: int, count: int, *, uniform: bool = False) -> np.ndarray:
    """The first `count` elements of a block in fp32, from a stream of its own: standard normal, or in [-1, 1)."""
    key = hashlib.blake2b(f"initial value\0{seed}\0{name}".encode(), digest_size=16).digest()
    draw = np.random.Generator(np.random.Philox(key=np.frombuffer(key, np.uint64), counter=[0, 0, 0, block]))
    if uniform:
        return draw.random(count, dtype=np.float32) * np.float32(2) - np.float32(1)
    return draw.standard_normal(count, dtype=np.float32)
