"""Noise that is a function of sample and place: dropout, whose backward is itself, and NEFTune's on embeddings."""

import math

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.reference.random import DROPOUT, EMBEDDING, random_words
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


@op(family="embedding", shares={"out": "res"}, temporaries=lambda a: a.copies("res") + 5 * a.size("res"))
def embedding_noise(out: Output, /, res: Tensor, samples: Tensor, *, alpha: float, seed: int, stream: int) -> None:
    """out (B,T,C) <- res (B,T,C), samples (B,) int32: res + u alpha / sqrt(T C), u uniform in [-1, 1).

    Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", 2023, where T is the length of the sample:
    here it is the row's, padding and all documents of a pack included. `samples` are the rows' places in the run's
    sequence, modulo 2^32. Element i = t C + c of a row has word i % 4 of block i // 4 of random_words, with the row's
    place as the step, and u = floor(word / 2^8) / 2^23 - 1, so that every factor is exact in f32.
    """
    values = res.read()
    b, t, c = values.shape
    blocks = (0, -(-t * c // 4))
    words = (random_words(seed, int(place), stream, EMBEDDING, *blocks) for place in samples.read())
    bits = np.stack([word.T.ravel()[: t * c] for word in words])
    kind = values.dtype.type
    u = (bits >> np.uint32(8)).astype(kind).reshape(b, t, c) * kind(2.0**-23) - kind(1)
    out.write(values + u * kind(np.float32(alpha / math.sqrt(t * c))))
