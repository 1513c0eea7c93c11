"""Documents and the packed or padded rows that they become, by hand: what each document is in a row, and what is read
back of rows."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from llmq.data.batches.rows import Rows

Document = tuple[list[int], list[int]]  # tokens and targets


def cut(ids: Sequence[int], trained: Sequence[bool], lengths: Iterable[int], room: int) -> list[Document]:
    """Every piece of documents of these lengths that follow each other: two pieces share a token."""
    found = []
    for start, stop in pairwise(accumulate(lengths, initial=0)):
        for first in range(start, max(stop - 1, start + 1), room - 1):
            last = min(first + room, stop)
            targets = [ids[n] if trained[n] else -100 for n in range(first + 1, last)]
            found.append((list(ids[first:last]), [*targets, -100]))
    return sorted(found)


def taken_apart(rows: Rows, num_virtual: int = 0) -> list[Document]:
    """The documents of rows without the token 0. Their padding, and positions of virtual tokens, are tokens 0 that are
    not trained."""
    found, seq_len = [], rows.tokens.shape[1]
    for index, (tokens, targets) in enumerate(zip(rows.tokens, rows.targets, strict=True)):
        marks = [0, seq_len] if rows.borders is None else rows.borders[index].tolist()
        assert marks[0] == 0 and marks[-1] == seq_len and sorted(marks) == marks
        assert len({*marks}) == marks.index(seq_len) + 1  # no document is empty but those that are not there
        for start, stop in pairwise(marks[: marks.index(seq_len) + 1]):
            begin = start + num_virtual
            end = begin + int(np.max(np.flatnonzero(tokens[begin:stop]), initial=-1)) + 1
            for outside in (slice(start, begin), slice(end, stop)):
                assert not tokens[outside].any() and (targets[outside] == -100).all()
            assert end == stop or stop == seq_len
            found.append((tokens[begin:end].tolist(), targets[begin:end].tolist()))
    return sorted(found)
