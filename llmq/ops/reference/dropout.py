"""Dropout whose mask is a function of the sample, the position and the site; its backward is itself."""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.reference.random import DROPOUT, random_words
from llmq.ops.seam import op

STEPS = 1 << 16  # a rate is a multiple of its reciprocal


# The mask, and the random words of one row of tokens.
@op(family="dropout", shares={"out": "residual"}, temporaries=lambda a: a.copies("x", "residual") + 4 * a.size("x"))
def dropout(
    out: Output,
    /,
    x: Tensor,
    samples: Tensor,
    residual: Tensor | None,
    *,
    rate: float,
    seed: int,
    stream: int,
    first: int,
    length: int,
) -> None:
    """out (...,K) <- x (...,K), samples (B,) int32, residual (...,K) or None: keep x / (1 - rate) + residual.

    Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", 2014. x has the tokens from
    number `first` of B rows of `length` tokens; `samples` are the rows' places in the run's sequence, modulo 2^32.
    Element i = t K + k of a row has 16 bits of block i // 8 of random_words, with the row's place as the step: of its
    words the low halves, then the high ones. It is left out if they are less than rate 2^16, rounded to a whole number,
    by which the factor goes too.
    """
    if not out.wanted:
        return
    values, width = x.read(), x.shape[-1]
    rows, kind = values.reshape(-1, width), values.dtype.type
    level = dropped_steps(rate)
    keep = np.empty(rows.shape, bool)
    places = samples.read()
    done = 0
    while done < len(rows):
        sample, token = divmod(first + done, length)
        count = min(length - token, len(rows) - done)
        start, stop = token * width, (token + count) * width
        words = random_words(seed, int(places[sample]), stream, DROPOUT, start // 8, -(-stop // 8))
        halves = np.concatenate([words.astype(np.uint16), (words >> np.uint32(16)).astype(np.uint16)])
        bits = halves.T.ravel()[start % 8 :][: count * width]
        keep[done : done + count] = (bits >= level).reshape(count, width)
        done += count
    value = np.where(keep, rows * kind(np.float32(STEPS / (STEPS - level))), kind(0)).reshape(values.shape)
    out.write(value if residual is None else value + residual.read().reshape(value.shape))


def dropped_steps(rate: float) -> int:
    """Of 2^16 values of a random number those that leave an element out."""
    return min(round(rate * STEPS), STEPS - 1)
