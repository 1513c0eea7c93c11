"""Cross-entropy of each token against its target, with its gradient made in the same pass, and the sum over tokens."""

import numpy as np

from llmq.operands import Output, Tensor, slices
from llmq.ops.seam import op
from llmq.ops.temporaries import elementwise, if_whole
from llmq.tensor import IGNORED


@op(
    family="cross-entropy",
    shares={"d_logits": "logits"},
    rows={"d_logits"},
    temporaries=if_whole("d_logits", elementwise("d_logits", 1, "logits")),
)
def cross_entropy(
    d_logits: Output, loss: Output, hits: Output, /, logits: Tensor, targets: Tensor, *, vocab_size: int, z_loss: float
) -> None:
    """d_logits (M,Vp), loss, hits (M,) <- logits (M,Vp), targets (M,) int32; d_logits: of the sum of losses.

    loss = lse - logits[target] + z_loss * lse^2 with lse = log(sum(exp(logits))) (z-loss: PaLM, 2022), so
    d_logits = softmax(logits) * (1 + 2 z_loss lse) - onehot(target). Columns from `vocab_size` on are padding: no
    probability, gradient 0. Target -100: loss 0, gradient 0, no hit, whatever the logits are.
    hits is 1 where the target is what argmax gives, the first of the largest logits, and the loss a number; else 0.
    """
    values, found, in_rows = [], [], d_logits.in_rows
    for start, count in slices(logits.shape) if in_rows else [(0, logits.shape[0])]:
        x, ids = logits.chunk(start, count).read(), targets.read()[start : start + count]
        trained = np.flatnonzero(ids != IGNORED)
        real, d = x[:, :vocab_size], np.zeros_like(x)
        p = d[:, :vocab_size]
        best = real.argmax(axis=-1)[:, None]
        largest = np.take_along_axis(real, best, axis=-1)
        np.subtract(real, largest, out=p)
        np.exp(p, out=p)
        total = p.sum(axis=-1)
        lse = largest[:, 0] + np.log(total)

        value = np.zeros_like(lse)
        value[trained] = (lse + z_loss * lse * lse)[trained] - x[trained, ids[trained]]
        values.append(value)
        found.append((best[:, 0] == ids) & ~np.isnan(value))
        if d_logits.wanted:
            p *= ((1 + 2 * z_loss * lse) / total)[:, None]
            p[trained, ids[trained]] -= 1
            p[ids == IGNORED] = 0
            (d_logits.chunk(start, count) if in_rows else d_logits).write(d)
    loss.write(np.concatenate(values))
    hits.write(np.concatenate(found).astype(np.int32))


@op(family="cross-entropy")
def loss_sum(
    loss_total: Output, num_tokens: Output, num_hits: Output, /, loss: Tensor, targets: Tensor, hits: Tensor | None
) -> None:
    """loss_total, num_tokens, num_hits (1,) <- loss (...), targets, hits (...) int32: sum of losses, number of
    trained tokens, number of hits where a loss has them.

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
    num_hits.write(np.array([0 if hits is None else hits.read().sum()], np.int32))
