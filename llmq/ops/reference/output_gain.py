"""What multiplies the outputs of a map that has an adapter: trained gains (IA3), or magnitudes over norms (DoRA).

DoRA (Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024): the rows of W + s B A are normed to the
magnitudes m. With P = W A^T and G = A A^T the squares of the norms are |w|^2 + 2 s b P + s^2 b G b^T for each row w of
W, b of B: W + s B A is never made.
"""

import numpy as np

from llmq.operands import Output, Tensor, slices
from llmq.ops.seam import op


# The weight is read in slices.
@op(family="adapters", temporaries=lambda a: a.copies("up") + 3 * a.size("up"))
def output_gain(
    gain: Output,
    norm: Output,
    /,
    weight: Tensor | None,
    through: Tensor | None,
    gram: Tensor | None,
    up: Tensor | None,
    magnitude: Tensor | None,
    *,
    scale: float,
    first: int,
) -> None:
    """gain (N,), norm (N,) <- weight (N,K), through = weight A^T (N,S), gram = A A^T (S,S), up (N,R), magnitude.

    norm = |weight + scale B A| of each row with B = up, gain = magnitude / norm. A is rows [first, first + R) of S,
    which may be those of several adapters. Without a weight the gain is the magnitude (in any shape of N numbers), and
    1 where there is none either.
    """
    kind = np.float64 if gain.dtype == "fp64" else np.float32
    m = np.ones(gain.shape, kind) if magnitude is None else magnitude.read().reshape(gain.shape)
    if weight is None or through is None or gram is None or up is None:
        gain.write(m)
        return
    mine = slice(first, first + up.shape[-1])
    b, p, g = up.read(), through.read()[:, mine], gram.read()[mine, mine]
    squares = np.empty(b.shape[0], b.dtype)
    for start, count in slices(weight.shape):
        w = weight.chunk(start, count).read()
        squares[start : start + count] = np.sum(w * w, axis=1)
    squares += scale * np.sum(b * (2 * p + scale * (b @ g)), axis=1)
    value = np.sqrt(np.maximum(squares, 0))
    norm.write(value)
    gain.write(m / value)


@op(family="adapters")
def output_gain_backward(d_magnitude: Output, /, d_gain: Tensor, norm: Tensor | None) -> None:
    """d_magnitude (N,) <- d_gain (N,), norm (N,) or None: d_gain / norm, which passes no gradient."""
    value = d_gain.read() if norm is None else d_gain.read() / norm.read()
    d_magnitude.write(value.reshape(d_magnitude.shape))
