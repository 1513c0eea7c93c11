"""Noise on the input tokens of training: off by default, never on targets or in evaluation.

token-dropout=P   Each input token is, with probability P, replaced by one drawn uniformly from the vocabulary: a word
                  is dropped without a placeholder, which would be a token that the model never meets again (Xie et al.,
                  "Data Noising as Smoothing in Neural Network Language Models", 2017, has both).
span-shuffle=P    Rows are cut into spans of 4 tokens, from a place of each row's own on; each is, with probability P,
                  put into random order: local word order as in Lample et al., "Unsupervised Machine Translation Using
                  Monolingual Corpora Only", 2018. Spans end at the borders of packed documents and where padding
                  begins. A token that moves to the left is then in sight of the position that has to predict it, and
                  could be copied: that target alone is not trained (-100); all others stay as they are.

What happens to a token is a function of the run's seed, the row's place in the run's sequence, and the position: the
same after a resume, for any batch size and any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from llmq.data.batches.permutation import addressed_bits
from llmq.data.batches.rows import Rows
from llmq.errors import UsageError
from llmq.model.rope import document_positions
from llmq.tensor import IGNORED

SPAN = 4
DROP, REPLACE, FIRST_SPAN, SHUFFLE, ORDER = range(5)  # purposes: what random bits are for


@dataclass(frozen=True)
class Augmentation:
    """The augmentations of a run with their probabilities, in the order in which they are applied."""

    rates: tuple[tuple[str, float], ...]
    vocab_size: int
    seed: int
    num_virtual: int = 0

    def __call__(self, rows: Rows, places: np.ndarray) -> Rows:
        """`rows` (n,T) with noise, where row i is at `places[i]` of the run's sequence."""
        for name, rate in self.rates:
            rows = KINDS[name](rows, rate, np.asarray(places), self)
        return rows


def open_augmentation(text: str | None, vocab_size: int, seed: int, num_virtual: int = 0) -> Augmentation | None:
    """What `--augment token-dropout=0.05,span-shuffle=0.1` asks for; None for nothing.

    UsageError names everything that is wrong with the text.
    """
    if text is None:
        return None
    rates: dict[str, float] = {}
    problems = []
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            rate = float(value)
        except ValueError:
            rate = -1.0
        if name not in KINDS:
            problems.append(f"there is no {name!r}: there are {' and '.join(KINDS)}")
        elif name in rates:
            problems.append(f"{name} is there twice")
        elif not 0 < rate <= 1:
            problems.append(f"{name}={value} is not a probability above 0 and up to 1, such as {name}=0.1")
        rates[name] = rate
    if problems:
        raise UsageError(f"--augment {text}: {'; '.join(problems)}")
    return Augmentation(tuple((name, rates[name]) for name in KINDS if name in rates), vocab_size, seed, num_virtual)


def shuffle_spans(rows: Rows, rate: float, places: np.ndarray, about: Augmentation) -> Rows:
    """Tokens of some spans in another order; targets that could then be copied are not trained."""
    (count, length), seed = rows.tokens.shape, about.seed
    position = np.arange(length)
    start = (addressed_bits(seed, FIRST_SPAN, places, 1) % np.uint64(SPAN)).astype(np.int64)
    span = (position + start) // SPAN  # (n,T): which span a position is in
    document = np.zeros((count, length + 1), np.int64)
    if rows.borders is not None:
        np.put_along_axis(document, rows.borders.astype(np.int64), 1, axis=1)
    is_text = np.arange(length) >= about.num_virtual
    if rows.borders is not None:
        is_text = document_positions(rows.borders, length) >= about.num_virtual
    # (n,T): which document it is in, of which virtual tokens are a part of their own
    document = 2 * document.cumsum(1)[:, :length] + is_text + _padding(rows)
    chosen = np.take_along_axis(_uniform(addressed_bits(seed, SHUFFLE, places, length // SPAN + 2)), span, 1) < rate
    keys = addressed_bits(seed, ORDER, places, length) >> np.uint64(1)
    keys = np.where(chosen, keys, position.astype(np.uint64))  # outside, positions are in order already
    source = np.lexsort((keys, span, document), axis=1)  # (n,T): from where each position gets its token
    targets = rows.targets.copy()
    row, to = np.nonzero(source > position)  # tokens that moved to the left
    targets[row, source[row, to] - 1] = IGNORED
    return rows._replace(tokens=np.take_along_axis(rows.tokens, source, 1), targets=targets)


def drop_tokens(rows: Rows, rate: float, places: np.ndarray, about: Augmentation) -> Rows:
    """Some tokens replaced by random ones of the vocabulary; those at the places of virtual tokens are never seen."""
    length, seed = rows.tokens.shape[1], about.seed
    dropped = _uniform(addressed_bits(seed, DROP, places, length)) < rate
    drawn = (_uniform(addressed_bits(seed, REPLACE, places, length)) * about.vocab_size).astype(np.int32)
    return rows._replace(tokens=np.where(dropped, drawn, rows.tokens))


def _padding(rows: Rows) -> np.ndarray:
    """(n,T) bool: tokens 0 without a target up to the end of the row. An end token 0 is among them, and stays last."""
    empty = (rows.tokens == 0) & (rows.targets == IGNORED)
    return np.logical_and.accumulate(empty[:, ::-1], axis=1)[:, ::-1]


def _uniform(bits: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) from 64-bit words."""
    return (bits >> np.uint64(11)) * 2.0**-53


# In the order of application: a token that dropout drew is not shuffled as if it stood in the text.
KINDS: dict[str, Callable[[Rows, float, np.ndarray, Augmentation], Rows]] = {
    "span-shuffle": shuffle_spans,
    "token-dropout": drop_tokens,
}
