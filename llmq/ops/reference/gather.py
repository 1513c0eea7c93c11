"""One position of each sequence, for the logits that generation needs."""

import numpy as np

from llmq.ops.seam import op
from llmq.tensor import Output, Tensor


@op(family="head")
def gather_rows(out: Output, /, x: Tensor, index: Tensor) -> None:
    """out (B,1,C) <- x (B,T,C), index (B,) int32: out[b, 0] = x[b, index[b]]."""
    rows = x.read()
    out.write(rows[np.arange(len(rows)), index.read()][:, None])
