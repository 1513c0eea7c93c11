"""The next token of each sequence: the most likely one, or one drawn from the logits, and the repetition penalty.

A token is drawn as the largest of logit + Gumbel noise, which draws from the softmax (Gumbel, 1954; the "Gumbel-max
trick") with no sum over the vocabulary: what runs in another order changes no choice. The noise has an address (seed,
sequence, position, token), so a sequence gets the same tokens in any batch.
"""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.reference.random import SAMPLING, random_words
from llmq.ops.seam import op


@op(family="head", temporaries=lambda a: a.copies("logits") + 4 * a.size("out"))
def penalize(out: Output, new_seen: Output, /, logits: Tensor, seen: Tensor, tokens: Tensor, *, penalty: float) -> None:
    """out (B,1,Vp), new_seen (B,Vp) int32 <- logits (B,1,Vp), seen (B,Vp) int32, tokens (B,1) int32.

    `tokens` are seen from now on. The logits of seen tokens are divided by `penalty` where they are positive and
    multiplied with it elsewhere (CTRL; Keskar et al., 2019).
    """
    marks, x = seen.read().copy(), logits.read()[:, 0]
    marks[np.arange(len(marks)), tokens.read()[:, 0]] = 1
    factor = x.dtype.type(penalty)
    out.write(np.where(marks != 0, np.where(x > 0, x / factor, x * factor), x)[:, None])
    new_seen.write(marks)


@op(family="head", temporaries=lambda a: a.copies("logits") + 12 * a.size("logits") // a.inputs["logits"].shape[0])
def sample(
    next_tokens: Output,
    next_positions: Output,
    /,
    logits: Tensor,
    positions: Tensor,
    samples: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> None:
    """next_tokens, next_positions (B,1) int32 <- logits (B,1,Vp), positions (B,1) int32, samples (B,) int32.

    Temperature 0 takes the largest logit, of equal ones the first. Otherwise z = logits / temperature is cut in this
    order: to the `top_k` largest (0: all), to the fewest largest whose probabilities, among those left, reach `top_p`
    (1: all), and to those at least `min_p` times as likely as the largest (0: all). Logits equal to the last one that
    stays, stay. The next token has the largest z + noise; `samples` are numbers of sequences, which address it together
    with their positions.
    """
    x, at = logits.read()[:, 0, :vocab_size], positions.read()
    chosen = np.empty(at.shape, np.int32)
    for row, values in enumerate(x):
        if temperature == 0:
            chosen[row] = values.argmax()
            continue
        z = values * values.dtype.type(1 / temperature)
        least = threshold(z, top_k=top_k, top_p=top_p, min_p=min_p)
        noise = gumbel(seed, int(at[row, 0]), int(samples.read()[row]), z.size)
        chosen[row] = np.where(z >= least, z + noise, -np.inf).argmax()
    next_tokens.write(chosen)
    next_positions.write(at + 1)


def threshold(z: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> float:
    """The smallest logit that stays."""
    ordered = np.sort(z)[::-1]
    least = ordered[top_k - 1] if 0 < top_k < z.size else -np.inf
    if top_p < 1:
        left = np.cumsum(np.exp(ordered[ordered >= least].astype(np.float64) - ordered[0]))
        least = ordered[np.searchsorted(left, top_p * left[-1])]
    return float(max(least, ordered[0] + np.log(min_p)) if min_p else least)


def gumbel(seed: int, position: int, sequence: int, count: int) -> np.ndarray:
    """Gumbel noise (count,) f32: -log(-log(1 - u)), u uniform in steps of 2^-32."""
    words = random_words(seed, position, sequence & 0xFFFFFFFF, SAMPLING, 0, -(-count // 4)).T.ravel()[:count]
    u = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)
    with np.errstate(divide="ignore"):  # u may be rounded to 1: such a token is not drawn
        return -np.log(-np.log1p(-u))
