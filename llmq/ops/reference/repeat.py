"""Random weights of a bench: one block of numbers, over and over."""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import op


@op(family="copies")
def repeat(out: Output, /, block: Tensor, *, first: int) -> None:
    """out (any shape) <- block (n,): its flat element i is element (first + i) mod n of the block."""
    if out.wanted:
        values, count = block.read(), int(np.prod(out.shape))
        start = first % values.size
        out.write(np.resize(np.roll(values, -start) if start else values, count).reshape(out.shape))
