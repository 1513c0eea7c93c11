"""SGD, and what scales and checks gradients that are used in backward, before their norm is known."""

import numpy as np

from llmq.operands import Output, Tensor, slices
from llmq.ops.reference.optimizer import rule, write, write_master
from llmq.ops.reference.random import M
from llmq.ops.seam import op


@op(family="optimizer")
def last_norm_scale(
    new_last_norm: Output,
    scale: Output,
    apply: Output,
    /,
    norm: Tensor,
    last_norm: Tensor,
    loss_total: Tensor,
    num_tokens: Tensor,
    *,
    grad_clip: float,
) -> None:
    """new_last_norm, scale, apply (1,) <- norm and last_norm of steps before, loss_total, num_tokens (1,).

    new_last_norm = norm if that is finite, else last_norm; scale = min(1, grad_clip / new_last_norm) / tokens, or 0
    without tokens (grad_clip 0: no clipping); apply = 1 if the loss is finite, else 0. new_last_norm may be the memory
    of last_norm.
    """
    seen, tokens = norm.read(), float(num_tokens.read()[0])
    last = np.where(np.isfinite(seen), seen, last_norm.read())
    finite = np.isfinite(loss_total.read()).astype(last.dtype)
    clip = grad_clip / float(last[0]) if grad_clip and last[0] > grad_clip else 1.0
    new_last_norm.write(last)
    scale.write(np.full_like(last, clip / tokens if tokens else 0.0))
    apply.write(finite)


@op(family="optimizer", for_each_row=True)
def apply_if_finite(out: Output, /, partials: Tensor, apply: Tensor) -> None:
    """out (1,) <- apply (1,) if all partials (P,), sums of squares, are finite, else 0."""
    value = apply.read()
    out.write(np.where(np.isfinite(partials.read()).all(), value, np.zeros_like(value)))


@op(family="optimizer")
def apply_if_below(new_apply: Output, /, apply: Tensor, loss_total: Tensor, num_tokens: Tensor, limit: Tensor) -> None:
    """new_apply (1,) <- apply (1,), or 0 if loss_total / num_tokens is above the limit; all are (1,), and new_apply may
    be the memory of apply. Without tokens there is no loss."""
    value, tokens = apply.read(), num_tokens.read()[0]
    is_above = tokens > 0 and loss_total.read()[0] / value.dtype.type(tokens) > limit.read()[0]
    new_apply.write(np.zeros_like(value) if is_above else value)


@rule(held={"new_master", "new_m"})
def sgd(
    new_master: Output,
    new_m: Output,
    weight: Output,
    /,
    master: Tensor,
    m: Tensor | None,
    grad: Tensor,
    scale: Tensor,
    apply: Tensor,
    learning_rate: Tensor,
    step: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    seed: int,
    stream: int,
    first: int = 0,
    rate: float = 1.0,
) -> None:
    """new_master, new_m, weight <- master, m, grad (one shape; no m without momentum); the other four are (1,).

    As torch.optim.SGD without dampening, whose weight decay is part of the gradient: g = grad * scale + weight_decay
    master, m = momentum m + g, and with lr = learning_rate * rate, master = master - lr (g + momentum m) with nesterov,
    else master - lr m; without m that is master - lr g. Storage, rounding, shares and `apply` are as of `adamw`.
    """
    if apply.read()[0] == 0:
        return
    lr = float(learning_rate.read()[0]) * rate
    for start, rows in slices(master.shape):
        address = (seed, int(step.read()[0]), stream, first + start * master.shape[-1])
        value = master.chunk(start, rows).read()
        update = grad.chunk(start, rows).read() * scale.read() + weight_decay * value
        if m is not None:
            buffer = momentum * m.chunk(start, rows).read() + update
            update = update + momentum * buffer if nesterov else buffer
            write(new_m.chunk(start, rows), buffer, M, *address)
        write_master(new_master, weight, master, value - lr * update, (start, rows), *address)
