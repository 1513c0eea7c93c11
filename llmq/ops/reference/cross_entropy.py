"""Cross-entropy of each token against its target, with its gradient made in the same pass, and the sum over tokens."""

from collections.abc import Callable
from typing import Any

import numpy as np

from llmq.operands import Output, Tensor, slices
from llmq.ops.seam import op
from llmq.ops.temporaries import elementwise, if_whole
from llmq.tensor import IGNORED

OWN_ARRAYS = 5  # as large as the logits: what a loss of the caller's is taken to need, and both results


@op(
    family="cross-entropy",
    shares={"d_logits": "logits"},
    rows={"d_logits"},
    temporaries=if_whole("d_logits", elementwise("d_logits", 1, "logits")),
)
def cross_entropy(
    d_logits: Output, loss: Output, /, logits: Tensor, targets: Tensor, *, vocab_size: int, z_loss: float
) -> None:
    """d_logits (M,Vp), loss (M,) <- logits (M,Vp), targets (M,) int32; d_logits: gradient of the sum of losses.

    loss = lse - logits[target] + z_loss * lse^2 with lse = log(sum(exp(logits))) (z-loss: PaLM, 2022), so
    d_logits = softmax(logits) * (1 + 2 z_loss lse) - onehot(target). Columns from `vocab_size` on are padding: no
    probability, gradient 0. Target -100: loss 0, gradient 0, whatever the logits are.
    """
    values, in_rows = [], d_logits.in_rows
    for start, count in slices(logits.shape) if in_rows else [(0, logits.shape[0])]:
        x, ids = logits.chunk(start, count).read(), targets.read()[start : start + count]
        trained = np.flatnonzero(ids != IGNORED)
        real, d = x[:, :vocab_size], np.zeros_like(x)
        p = d[:, :vocab_size]
        largest = real.max(axis=-1, keepdims=True)
        np.subtract(real, largest, out=p)
        np.exp(p, out=p)
        total = p.sum(axis=-1)
        lse = largest[:, 0] + np.log(total)

        value = np.zeros_like(lse)
        value[trained] = (lse + z_loss * lse * lse)[trained] - x[trained, ids[trained]]
        values.append(value)
        if d_logits.wanted:
            p *= ((1 + 2 * z_loss * lse) / total)[:, None]
            p[trained, ids[trained]] -= 1
            p[ids == IGNORED] = 0
            (d_logits.chunk(start, count) if in_rows else d_logits).write(d)
    loss.write(np.concatenate(values))


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


@op(family="cross-entropy")
def loss_sum(loss_total: Output, num_tokens: Output, /, loss: Tensor, targets: Tensor) -> None:
    """loss_total (1,), num_tokens (1,) <- loss (...), targets (...) int32: sum of losses, number of trained.

    The sum is a binary tree over the losses padded with zeros to a power of two, the second half added to the first
    until one is left: the same additions on every machine.
    """
    values = loss.read().ravel()
    tree = np.zeros(1 << (values.size - 1).bit_length(), values.dtype)
    tree[: values.size] = values
    while tree.size > 1:
        tree = tree[: tree.size // 2] + tree[tree.size // 2 :]
    loss_total.write(tree)
    num_tokens.write(np.array([np.count_nonzero(targets.read() != IGNORED)], np.int32))
