"""From text to token files: read, tokenize in parallel batches, write. Memory is bounded; no half file is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmq.data import datasets
from llmq.data.sidecar import Sidecar, TokenizerNote, copy_tokenizer
from llmq.data.text import Document, open_documents, pieces, split
from llmq.data.token_file import TokenWriter
from llmq.data.tokenizer import TextTokenizer
from llmq.data.windows import matched
from llmq.errors import DataError, StorageError, UsageError

TRAIN, EVAL = "train.bin", "eval.bin"
TOKENIZER_FOLDER = "tokenizer"
BATCH_CHARACTERS = 1 << 21  # tokenized at once: the library holds about 100 MB meanwhile


@dataclass(frozen=True)
class Written:
    """A finished token file."""

    path: Path
    num_tokens: int
    num_documents: int


def tokenize_data(
    *,
    tokenizer: str,
    dataset: str | None = None,
    inputs: Sequence[str] = (),
    revision: str | None = None,
    eval_fraction: float = 0.1,
    eos_token: str | None = None,
    out_dir: str | Path | None = None,
    on_progress: Callable[[int, int], None] = lambda done_bytes, all_bytes: None,
) -> list[Written]:
    """Writes train.bin and, unless `eval_fraction` is 0, eval.bin, with sidecars and the tokenizer's files beside them.

    The text is that of a named `dataset`, or of the files that `inputs` (paths and globs) name: one file is one
    document, and each document ends with EOS. `tokenizer` is a folder, a hub name or a short name. `out_dir` is
    data/TEXT-TOKENIZER by default. `on_progress` is told the bytes done and in all. Files appear whole, at the end.

    Raises UsageError, DataError and StorageError.
    """
    if (dataset is None) == (not inputs):
        raise UsageError("give the text either as --dataset or as --input (and not both)")
    if not 0 <= eval_fraction < 1:
        raise UsageError(f"--eval-fraction {eval_fraction} is not in the range from 0 to below 1")
    if dataset is not None:
        if dataset not in datasets.NAMES:
            raise UsageError(
                f"--dataset {dataset} is not one of {', '.join(datasets.NAMES)}: give other text as files with --input"
            )
        paths, title = [datasets.tiny_shakespeare()], dataset
    else:
        problems: list[str] = []
        paths = matched(inputs, problems)
        if problems:
            raise DataError("\n".join(problems))
        title = paths[0].stem if len(paths) == 1 else paths[0].resolve().parent.name or "text"
    documents = open_documents(paths)
    folder = Path(out_dir) if out_dir is not None else Path("data") / f"{title}-{_short(tokenizer)}"
    if not eval_fraction and (folder / EVAL).exists():
        raise StorageError(
            f"{folder / EVAL} is of an earlier run and would stay beside the new {TRAIN}: "
            "delete it, or choose another --out-dir"
        )
    train, evaluation, chosen = split(documents, eval_fraction)
    opened = TextTokenizer.open(tokenizer, revision, eos_token)
    rule = (
        f"one file is one document (UTF-8, as it is; empty files are left out) and ends with {opened.eos_token}; text "
        f"that spells a special token is ordinary text; {chosen}"
    )
    total = sum(document.num_bytes for document in documents)
    done = 0
    with ExitStack() as stack:
        finished = []
        for name, part in ((TRAIN, train), (EVAL, evaluation)):
            if not part:
                continue
            writer = stack.enter_context(
                TokenWriter(folder / name, vocab_size=opened.vocab_size, tokenizer_sha256=opened.sha256)
            )
            for ids, num_bytes in _tokenized(part, opened):
                writer.append(ids)
                done += num_bytes
                on_progress(done, total)
            writer.seal()
            finished.append((writer, part))
        copy_tokenizer(opened.folder, folder / TOKENIZER_FOLDER)
        note = TokenizerNote(
            source=opened.source,
            revision=opened.revision,
            sha256=opened.sha256,
            folder=TOKENIZER_FOLDER,
            vocab_size=opened.vocab_size,
            eos_token=opened.eos_token,
            eos_token_id=opened.eos_token_id,
        )
        for writer, part in finished:
            writer.publish()
            Sidecar(
                num_tokens=writer.num_tokens,
                num_documents=len(part),
                document_rule=rule,
                text=(dataset,) if dataset else tuple(inputs),
                tokenizer=note,
            ).write(writer.path)
    return [Written(writer.path, writer.num_tokens, len(part)) for writer, part in finished]


def _tokenized(documents: Iterable[Document], tokenizer: TextTokenizer) -> Iterable[tuple[np.ndarray, int]]:
    """The ids of `documents`, each followed by EOS, batch by batch (n,) int32, and how many bytes they came from."""
    batch: list[str] = []
    ends: list[bool] = []
    characters = 0
    for document in documents:
        for piece in pieces(document, tokenizer.in_pieces):
            batch.append(piece)
            ends.append(False)
            characters += len(piece)
            if characters >= BATCH_CHARACTERS:
                yield _encoded(batch, ends, tokenizer)
                batch, ends, characters = [], [], 0
        batch.append("")
        ends.append(True)
    yield _encoded(batch, ends, tokenizer)


def _encoded(batch: Sequence[str], ends: Sequence[bool], tokenizer: TextTokenizer) -> tuple[np.ndarray, int]:
    encodings = tokenizer.encoder.encode_batch_fast(batch, add_special_tokens=False)
    eos = np.array([tokenizer.eos_token_id], np.int32)
    parts = [eos if end else np.array(code.ids, np.int32) for code, end in zip(encodings, ends, strict=True)]
    return np.concatenate(parts), sum(len(piece.encode()) for piece in batch)


def _short(tokenizer: str) -> str:
    """A tokenizer's name as part of a folder's name."""
    return Path(tokenizer).resolve().name.lower() if Path(tokenizer).is_dir() else tokenizer.rsplit("/", 1)[-1].lower()
