"""Token embedding: row `token` of the table; backward adds each token's gradient to its row."""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import Arguments, op
from llmq.tensor import DTYPES, Ref


def _unused_rows(table: Ref, call: Arguments) -> int:
    """Bytes of the table's rows that no token of the batch names."""
    rows, width = table.shape
    used = rows if call.different_tokens is None else call.different_tokens
    return int(max(rows - used, 0) * width) * DTYPES[table.dtype].itemsize


def _not_added_to(call: Arguments) -> int:
    """Rows that are neither read nor written; without accumulation all are set to zero."""
    return sum(2 * _unused_rows(ref, call) for ref in call.writes["d_weight"] if "d_weight" in call.added)


@op(
    family="embedding",
    untouched=lambda call: _unused_rows(call.reads["weight"], call),
    temporaries=lambda a: a.size("res") + a.copies("weight") * a.size("res") // (2 * a.size("weight")),
)
def embedding_forward(res: Output, /, tokens: Tensor, weight: Tensor) -> None:
    """res (B,T,C) <- tokens (B,T) int32, weight (Vp,C)."""
    res.write(weight.read_rows(tokens.read()))


# Rows are sorted by token, and summed over the positions of a token.
@op(family="embedding", untouched=_not_added_to, temporaries=lambda a: a.copies("d_res") + 2 * a.size("d_res"))
def embedding_backward(d_weight: Output, /, d_res: Tensor, tokens: Tensor) -> None:
    """d_weight (Vp,C) <- d_res (B,T,C), tokens (B,T) int32.

    Row v is the sum of d_res over the positions that hold token v, in a fixed order, and zero for absent tokens. Only
    rows that occur are computed: a dense f32 gradient of a large vocabulary would cost more than the model.
    """
    d, ids = d_res.read(), tokens.read().ravel()
    order = np.argsort(ids, kind="stable")
    rows, starts = np.unique(ids[order], return_index=True)
    d_weight.write_rows(rows, np.add.reduceat(d.reshape(-1, d.shape[-1])[order], starts, axis=0))
