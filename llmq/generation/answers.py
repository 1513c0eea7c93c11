"""What a model is asked of held-out documents, and how near its own answers come to those that are there.

A document's question is what comes before the last of its trained runs, its reference that run as text: those of a
prompt and its answer, and of the last trained turn of a chat. Text, which is trained as a whole, asks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from llmq.errors import UsageError

Decode = Callable[[Sequence[int]], str]  # tokens to text, without special ones
ROUGE = ("rouge1", "rouge2", "rougeL")
PACKAGES = {"bleu": "sacrebleu", "rouge": "rouge_score"}  # what measures it


class Exercise(NamedTuple):
    """The tokens of a question, and the text of the answer that is there."""

    prompt: tuple[int, ...]
    reference: str


def exercises(documents: Iterable[tuple[np.ndarray, np.ndarray]], decode: Decode) -> Iterator[Exercise]:
    """Those of documents, each its ids (n,) and which of them are trained (n,); none of one that asks nothing."""
    for ids, trained in documents:
        *_, (start, stop) = (0, 0), *runs(trained)
        if start:
            yield Exercise(tuple(ids[:start].tolist()), decode(ids[start:stop].tolist()))


def runs(trained: np.ndarray) -> list[tuple[int, int]]:
    """Where the runs of trained tokens (n,) begin and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], trained, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def require_packages(metrics: Iterable[str]) -> None:
    """UsageError for metrics whose package is not installed."""
    if lacking := [name for name in metrics if name in PACKAGES and find_spec(PACKAGES[name]) is None]:
        raise UsageError(
            f"{' and '.join(lacking)} need packages that are not installed: pip install 'llmq-train[eval]', or leave "
            "them out"
        )


def answer_scores(metrics: Iterable[str], answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """How near answers come to references, by metric; `rouge` gives three.

    exact_match: the share that is equal, but for white space around it. bleu: sacrebleu's of the corpus, 0 to 100.
    rouge1, rouge2, rougeL: the mean F-measure of rouge-score, 0 to 1, of words of a-z and 0-9 without stemming.
    """
    found: dict[str, float] = {}
    for metric in metrics:
        found |= _SCORES[metric](answers, references)
    return found


def _exact_match(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    equal = [one.strip() == other.strip() for one, other in zip(answers, references, strict=True)]
    return {"exact_match": sum(equal) / len(equal)}


def _bleu(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    return {"bleu": float(import_module("sacrebleu").corpus_bleu(list(answers), [list(references)]).score)}


def _rouge(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    scorer = import_module("rouge_score.rouge_scorer").RougeScorer(list(ROUGE))
    each = [scorer.score(reference, answer) for answer, reference in zip(answers, references, strict=True)]
    return {name: sum(one[name].fmeasure for one in each) / len(each) for name in ROUGE}


_SCORES = {"exact_match": _exact_match, "bleu": _bleu, "rouge": _rouge}
OF_ANSWERS = tuple(_SCORES)
