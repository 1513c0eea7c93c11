"""A loss of the caller's: a Python function of logits."""

from collections.abc import Callable
from typing import Any

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import op
from llmq.ops.temporaries import elementwise

OWN_ARRAYS = 5  # as large as the logits: what a loss of the caller's is taken to need, and both results


@op(
    family="cross-entropy",
    shares={"d_logits": "logits"},
    is_python=True,
    temporaries=elementwise("d_logits", OWN_ARRAYS, "logits"),
)
def own_loss(
    d_logits: Output,
    loss: Output,
    /,
    logits: Tensor,
    targets: Tensor,
    *,
    function: Callable[..., tuple[Any, Any]],
    vocab_size: int,
) -> None:
    """d_logits (M,Vp), loss (M,) <- logits (M,Vp), targets (M,) int32, by a Python function.

    It gets NumPy or CuPy, the first `vocab_size` columns of the logits and the targets, and returns both results for
    these columns; the gradient of the others is 0.
    """
    x = logits.read()
    losses, gradient = function(np, x[:, :vocab_size], targets.read())
    d = np.zeros_like(x)
    d[:, :vocab_size] = gradient
    loss.write(losses)
    d_logits.write(d)
