"""Metrics of a model on held-out documents: of the log p of their trained tokens, and of its own answers.

A document begins with nothing before it, so that its first token is never predicted, as in training. One of more than
`seq_len` tokens is read in pieces, each of which begins with nothing before it but the last token of the piece before.
"""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llmq.api.load import LoadedModel
from llmq.data.batches.loader import require_one_tokenizer
from llmq.data.batches.named_data import open_beside
from llmq.data.tokens.token_file import TokenFile
from llmq.data.tokens.tokenize import Say
from llmq.data.tokens.tokenizer import Sidecar, TextTokenizer, tokenizer_folder
from llmq.disk import write_whole
from llmq.errors import UsageError
from llmq.generation.answers import OF_ANSWERS, Decode, answer_scores, exercises, require_packages, runs
from llmq.generation.weights import ModelWeights
from llmq.options.commands import GenerateOptions
from llmq.options.parse import Options
from llmq.screen import Report, StartTask, counted
from llmq.tensor import IGNORED

SORTED = 64  # batches of which rows of like length are read together
TOKEN_FILE = ".bin"
Documents = Sequence[tuple[np.ndarray, np.ndarray]]  # ids (n,), and which of them are trained (n,)


@dataclass
class Sums:
    """Of trained tokens that are predicted: -log p in nats, how many, how many of these the model finds most likely,
    and the UTF-8 bytes of the text that they are."""

    nats: float = 0.0
    tokens: int = 0
    correct: int = 0
    num_bytes: int = 0

    def metrics(self) -> dict[str, float]:
        """The metrics by name; NaN where nothing is predicted."""
        loss = self.nats / self.tokens if self.tokens else math.nan
        bits = self.nats / (math.log(2) * self.num_bytes) if self.num_bytes else math.nan
        accuracy = self.correct / self.tokens if self.tokens else math.nan
        perplexity = math.exp(min(loss, 700)) if self.tokens else math.nan
        return {"loss": loss, "perplexity": perplexity, "bits_per_byte": bits, "accuracy": accuracy}


OF_TOKENS = tuple(Sums().metrics())
METRICS = (*OF_TOKENS, *OF_ANSWERS)


def num_bytes(ids: np.ndarray, trained: np.ndarray, decode: Decode) -> int:
    """The UTF-8 bytes of the text that the trained tokens of a document (n,), less its first, are; special tokens are
    no text. A character that several tokens make counts with the last of them."""

    def before(stop: int) -> int:
        return len(decode(ids[:stop].tolist()).rstrip("\ufffd").encode())

    return sum(before(stop) - before(max(start, 1)) for start, stop in runs(trained) if stop > 1)


def token_sums(model: LoadedModel, documents: Documents, decode: Decode | None, report: Report) -> Sums:
    """The sums over all documents; without `decode` those of bytes are 0."""
    found, rows = Sums(), _pieces(documents, model.seq_len)
    while block := list(islice(rows, SORTED * model.batch_size)):
        block.sort(key=lambda piece: -len(piece[0]))
        for start in range(0, len(block), model.batch_size):
            tokens, targets = _padded(block[start : start + model.batch_size])
            score, hits = model.score_and_hits(tokens, targets)
            found.nats -= float(score.sum(dtype=np.float64))
            found.tokens += int((targets != IGNORED).sum())
            found.correct += int(hits.sum())
            report(found.tokens, None)
    if decode is not None:
        found.num_bytes = sum(num_bytes(*document, decode) for document in documents)
    return found


def _pieces(documents: Documents, seq_len: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens (t,) and their targets (t,), of at most seq_len; those without a target are left out."""
    for ids, trained in documents:
        targets = np.where(trained[1:], ids[1:], IGNORED)
        for start in range(0, len(targets), seq_len):
            part = slice(start, min(start + seq_len, len(targets)))
            if (targets[part] != IGNORED).any():
                yield ids[part], targets[part]


def _padded(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    shape = (len(rows), max(len(ids) for ids, _ in rows))
    tokens, targets = np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
    for index, (ids, goals) in enumerate(rows):
        tokens[index, : len(ids)], targets[index, : len(ids)] = ids, goals
    return tokens, targets


@dataclass(frozen=True)
class HeldOut:
    """Documents, what their tokens are as text (None: not known), and the tokens that end their answers."""

    documents: Documents
    decode: Decode | None
    end_texts: tuple[str, ...]

    @classmethod
    def open(
        cls, name: str, limit: int | None, options: Options, weights: ModelWeights, say: Say, task: StartTask
    ) -> HeldOut:
        """The first `limit` documents of a token file, or of data that --data of llmq-train names, tokenized as there.
        UsageError, DataError."""
        source, room = weights.source, options.to_flat()["seq_len"]
        patterns = [glob.escape(name)]
        if Path(name).suffix != TOKEN_FILE:
            patterns = open_beside(name, options.source, source, room, say=say, task=task)
        files = [TokenFile.open(path) for pattern in patterns for path in sorted(glob.glob(pattern)) or [pattern]]
        for file in files:
            file.check_without(source.config.placeholders)
        require_one_tokenizer(files, source.tokenizer_folder)
        known = [(file, it) for file in files if (it := Sidecar.read(file.path, file.num_tokens)) is not None]
        folder = source.tokenizer_folder or next((tokenizer_folder(file.path, it) for file, it in known), None)
        vocab = source.config.vocab_size
        each = (file.document(number, vocab) for file in files for number in range(file.num_documents))
        documents = list(islice(each, limit))
        if folder is None:
            return cls(documents, None, ())
        encoder = TextTokenizer.open(str(folder)).encoder
        ends = {number for _, sidecar in known for number in sidecar.end_token_ids}
        return cls(documents, encoder.decode, tuple(str(encoder.id_to_token(number)) for number in sorted(ends)))


def measure(
    model: LoadedModel, data: HeldOut, metrics: Sequence[str], max_tokens: int, task: StartTask
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was measured, by name, and each question of it with its two answers. UsageError for what the data or the
    model lacks."""
    if data.decode is None and (wanted := [one for one in metrics if one in (*OF_ANSWERS, "bits_per_byte")]):
        raise UsageError(f"{', '.join(wanted)} read text, and neither model nor data has a tokenizer: leave them out")
    found: dict[str, Any] = {"rows": len(data.documents)}
    if of_tokens := [name for name in metrics if name in OF_TOKENS]:
        with task("Reading") as report:
            decode = data.decode if "bits_per_byte" in metrics else None
            sums = token_sums(model, data.documents, decode, report)
        found |= {"trained_tokens": sums.tokens, **({} if decode is None else {"bytes": sums.num_bytes})}
        found |= {name: value for name, value in sums.metrics().items() if name in of_tokens}
    lines: list[dict[str, Any]] = []
    if of_answers := [name for name in metrics if name in OF_ANSWERS]:
        assert data.decode is not None
        if not (asked := list(exercises(data.documents, data.decode))):
            raise UsageError(
                f"{', '.join(of_answers)} are of answers, and no row has a prompt and an answer: give rows that have, "
                "or leave them out"
            )
        with task("Answering") as report:
            given = _answers(model, [one.prompt for one in asked], data.end_texts, max_tokens, report)
        lines = [
            {"prompt": data.decode(one.prompt), "reference": one.reference, "answer": answer}
            for one, answer in zip(asked, given, strict=True)
        ]
        found |= {"answers": len(asked), **answer_scores(of_answers, given, [one.reference for one in asked])}
    return found, lines


def _answers(
    model: LoadedModel, prompts: Sequence[Sequence[int]], stop: Sequence[str], max_tokens: int, report: Report
) -> list[str]:
    """The most likely answers to prompts, in order."""
    about = {"max_tokens": max_tokens, "batch_size": model.batch_size, "stop": stop, "logprobs": False}
    found = dict[int, list[str]]()
    pieces = model.generate([list(prompt) for prompt in prompts], stream=True, **about)
    for piece in counted(pieces, None, report):
        found.setdefault(piece.index, []).append(piece.text or "")
    return ["".join(found.get(index, ())) for index in range(len(prompts))]


def evaluated(
    name: str,
    options: GenerateOptions,
    rows: Options,
    metrics: Sequence[str],
    limit: int | None,
    answers: str | None,
    *,
    say: Say,
    task: StartTask,
) -> dict[str, Any]:
    """What `llmq-eval --data` measures, by name, with --answers written. LlmqError."""
    if unknown := [one for one in metrics if one not in METRICS]:
        raise UsageError(f"--metrics {', '.join(unknown)}: known are {', '.join(METRICS)}")
    if answers is not None and not set(metrics) & set(OF_ANSWERS):
        raise UsageError(f"--answers {answers}: no metric is of answers: add --metrics {','.join(OF_ANSWERS)}")
    require_packages(metrics)
    weights = weights_of(options, say)
    data = HeldOut.open(name, limit, rows, weights, say, task)
    about = (options.dtype, options.device, options.batch_size, rows.to_flat()["seq_len"])
    with task("Loading the model"):
        model = LoadedModel(weights, *about)
    found, lines = measure(model, data, metrics, options.max_tokens, task)
    if answers is not None:
        write_whole(Path(answers), "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines).encode())
    return {"model": options.model, **({"adapter": options.adapter} if options.adapter else {}), "data": name, **found}


def weights_of(options: GenerateOptions, say: Say) -> ModelWeights:
    """The model that options name, having said what the user should know of it."""
    about = {name: getattr(options, name) for name in ("adapter", "base_dtype", "revision")}
    weights = ModelWeights.find(options.model, **about)
    for note in weights.notes:
        say(note)
    return weights
