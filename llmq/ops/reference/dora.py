"""The magnitudes of weight-decomposed adapters (DoRA; Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024).

The rows of W + s B A are normed to the magnitudes m. With P = W A^T and G = A A^T the squares of the norms are
|w|^2 + 2 s b P + s^2 b G b^T for each row w of W, b of B: W + s B A is never made.
"""

import numpy as np

from llmq.ops.seam import op
from llmq.tensor import Output, Tensor, slices


@op(family="adapters")
def dora_gain(
    gain: Output,
    norm: Output,
    /,
    weight: Tensor,
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
    which may be those of several adapters. Rows without an adapter, for which there is but the weight, have gain 1.
    """
    if through is None or gram is None or up is None or magnitude is None:
        gain.write(np.ones(gain.shape, np.float64 if gain.dtype == "fp64" else np.float32))
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
    gain.write(magnitude.read() / value)


@op(family="adapters")
def dora_magnitude(d_magnitude: Output, /, d_gain: Tensor, norm: Tensor) -> None:
    """d_magnitude (N,) <- d_gain (N,), norm (N,): d_gain / norm, as the norm passes no gradient (section 4.3)."""
    d_magnitude.write(d_gain.read() / norm.read())
