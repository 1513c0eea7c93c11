"""How rows become tokens, documents as tokens, what was encoded in numbers, and the notes on it in words."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class EncodeOptions:
    """How rows become tokens. None: found from the data and the tokenizer."""

    data_format: str | None = None  # one of formats.FORMATS
    mapping: tuple[tuple[str, str], ...] = ()  # our name of a column, the data's
    chat_template: str | None = None  # see template.open_template; for prompts and answers: makes them chats
    train_on: str | None = None  # assistant, all, last, or roles with commas
    overlong: str = "turns"  # what happens to rows of more than seq_len tokens
    seq_len: int | None = None  # None: no row is too long
    prompt_template: str | None = None  # Jinja that writes a row's prompt from its columns
    preamble: bool = True  # begin Alpaca's prompt with its usual words


@dataclass
class Counts:
    """What was encoded so far. Counts of several encoders (of several processes) are added up."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    trained: int = 0  # tokens
    overlong: int = 0  # rows of more than seq_len tokens
    too_long: int = 0  # of these, those that give no document
    turns_cut: int = 0  # trained turns that rows lost because they are too long
    longest: int = 0  # tokens of the longest of these
    untrained: int = 0  # rows without a trained token, which give no document
    spelled: int = 0  # chats in whose content a special token is spelled
    unended: int = 0  # chats whose last trained turn the template does not end: EOS was added
    divided: int = 0  # chats that the template makes several documents of
    divided_into: int = 0  # documents
    masked: int = 0  # turns that are not trained because their messages say so
    unread: Counter[str] = field(default_factory=Counter)  # keys of messages that no template reads, with their rows
    end_tokens: set[int] = field(default_factory=set)  # ids that ended a trained turn or document

    def add(self, other: Counts) -> None:
        """Adds what another encoder counted."""
        for name, value in vars(other).items():
            joined = max if name == "longest" else operator.or_ if name == "end_tokens" else operator.add
            setattr(self, name, joined(getattr(self, name), value))


def notes(counts: Counts, seq_len: int | None, overlong: str, bad: int) -> list[str]:
    """Notes on rows that were encoded, a line each; `bad` of them were left out."""
    lines = [
        f"{count:,} {text}"
        for count, text in (
            (bad, "bad rows were left out"),
            (counts.untrained, "rows without a trained token were left out"),
            (counts.masked, "turns are not trained, as their messages say"),
            (counts.spelled, "chats have text that spells a special token, which became that token"),
            (counts.unended, "chats have a last turn that the template does not end: the end token was added"),
            (
                counts.divided,
                f"chats became {counts.divided_into:,} documents, as the chat template writes earlier turns "
                "differently from the last one: each of their turns is trained in a document that ends with it",
            ),
        )
        if count
    ]
    if counts.overlong:
        lost = f" ({counts.too_long:,} rows and {counts.turns_cut:,} trained turns are left out)"
        done = OVERLONG[overlong] + lost * (overlong == "turns")
        lines.append(
            f"{counts.overlong:,} rows of more than {seq_len:,} tokens {done}: --seq-len {counts.longest} keeps all"
        )
    if counts.unread:
        unread = ", ".join(f"{key} ({rows:,})" for key, rows in sorted(counts.unread.items()))
        lines.append(f"messages have keys that the chat template does not read, and nothing else does (rows): {unread}")
    return lines


# What is done with rows of more than seq_len tokens, in words. `turns` never trains a part of an answer; text has none,
# and stays whole.
OVERLONG = {
    "turns": "keep the whole turns that fit, and are left out if no trained one does",
    "truncate": "are cut off",
    "split": "are split",
    "drop": "are left out",
}


class Encoded(NamedTuple):
    """A document: its tokens, end included, and which of them are trained as targets.

    `turns` has, of each trained turn, how many tokens there are up to its trained stop, and up to the end of its
    message, ascending; None for text, which has none, and () where it is not asked for.
    """

    place: str  # of the row that it is from: several documents can be
    ids: np.ndarray  # (n,) int32
    trained: np.ndarray | None  # (n,) bool; None: every token
    turns: Sequence[tuple[int, int]] | None = None


def shortened(whole: Encoded, limit: int, overlong: str) -> tuple[list[Encoded], int]:
    """Documents of at most `limit` tokens of one that may have more, and how many of its turns are lost."""
    num_tokens, turns = len(whole.ids), whole.turns or ()
    if num_tokens <= limit:
        return [whole], 0
    fitting = [min(end, limit) for stop, end in turns if stop <= limit]
    cuts = {
        "turns": [(0, fitting[-1])] if fitting else [],
        "truncate": [(0, limit)],
        "split": [(at, at + limit) for at in range(0, num_tokens, limit)],
        "drop": [],
    }[overlong]
    lost = len(turns) - len(fitting) if overlong == "turns" else 0
    _, ids, trained, _ = whole
    return [Encoded(whole.place, ids[a:b], None if trained is None else trained[a:b]) for a, b in cuts], lost


def trained_runs(trained: np.ndarray | None) -> list[tuple[int, int]] | None:
    """The ends of runs of trained tokens, as turns; None where all tokens are trained, as in text."""
    if trained is None or trained.all():
        return None
    stops = (np.flatnonzero(trained & ~np.append(trained[1:], False)) + 1).tolist()
    return list(zip(stops, stops, strict=True))
