"""Documents as tokens; of rows of more than a sequence has, whole turns, or what else --overlong says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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

    def length(self, overlong: str) -> int:
        """Tokens as they count for what is too long: text never is, where turns are what is kept."""
        return 0 if self.turns is None and overlong == "turns" else len(self.ids)


def shortened(whole: Encoded, limit: int, overlong: str) -> tuple[list[Encoded], int]:
    """Documents of at most `limit` tokens of one that may have more, and how many of its turns are lost."""
    num_tokens, lost = len(whole.ids), 0
    if num_tokens <= limit:
        return [whole], 0
    match overlong:
        case "drop":
            cuts = []
        case "turns":
            turns = whole.turns or ()
            fitting = [min(end, limit) for stop, end in turns if stop <= limit]
            cuts, lost = [(0, fitting[-1])] if fitting else [], len(turns) - len(fitting)
        case "truncate":
            cuts = [(0, limit)]
        case _:
            cuts = [(at, at + limit) for at in range(0, num_tokens, limit)]
    _, ids, trained, _ = whole
    return [Encoded(whole.place, ids[a:b], None if trained is None else trained[a:b]) for a, b in cuts], lost


def trained_runs(trained: np.ndarray | None) -> list[tuple[int, int]] | None:
    """The ends of runs of trained tokens, as turns; None where all tokens are trained, as in text."""
    if trained is None or trained.all():
        return None
    stops = (np.flatnonzero(trained & ~np.append(trained[1:], False)) + 1).tolist()
    return list(zip(stops, stops, strict=True))
