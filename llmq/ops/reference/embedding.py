"""Token embedding: row `token` of the table; backward adds each token's gradient to its row."""

import numpy as np

from llmq.tensor import Output, Tensor


def embedding_forward(res: Output, /, tokens: Tensor, weight: Tensor) -> None:
    """res (B,T,C) <- tokens (B,T) int32, weight (Vp,C)."""
    res.write(weight.read_rows(tokens.read()))


def embedding_backward(d_weight: Output, /, d_res: Tensor, tokens: Tensor) -> None:
    """d_weight (Vp,C) <- d_res (B,T,C), tokens (B,T) int32.

    Row v is the sum of d_res over the positions that hold token v, in a fixed order, and zero for absent tokens. Only
    rows that occur are computed: a dense f32 gradient of a large vocabulary would cost more than the model.
    """
    if not d_weight.wanted:
        return
    d, ids = d_res.read(), tokens.read().ravel()
    order = np.argsort(ids, kind="stable")
    rows, starts = np.unique(ids[order], return_index=True)
    d_weight.write_rows(rows, np.add.reduceat(d.reshape(-1, d.shape[-1])[order], starts, axis=0))
