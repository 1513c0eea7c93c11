"""A matrix, column by column times a gain, as in adapters that learn magnitudes, and its gradients."""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import op


@op(family="adapters", shares={"y": "residual"}, temporaries=lambda a: a.copies("x", "residual") + a.size("y"))
def scale_columns_forward(y: Output, /, x: Tensor, gain: Tensor, bias: Tensor | None, residual: Tensor | None) -> None:
    """y (...,N) <- x (...,N), gain (N,), bias (N,) or None, residual (...,N) or None: gain x + bias + residual.

    The gain may have any shape of N numbers.
    """
    if not y.wanted:
        return
    value = x.read() * gain.read().reshape(-1)
    if bias is not None:
        value += bias.read()
    if residual is not None:
        value += residual.read().reshape(value.shape)
    y.write(value)


@op(family="adapters", forms={"d_x"}, temporaries=lambda a: a.copies("d_y", "x") + a.size("x") + a.writing("d_x"))
def scale_columns_backward(d_x: Output, d_gain: Output, /, d_y: Tensor, x: Tensor, gain: Tensor) -> None:
    """d_x (...,N), d_gain (N,) <- d_y (...,N), x (...,N), gain (N,): gain d_y, and the sum of d_y x over rows."""
    d = d_y.read()
    if d_gain.wanted:
        d_gain.write(np.sum((d * x.read()).reshape(-1, d.shape[-1]), axis=0).reshape(d_gain.shape))
    if d_x.wanted:
        d_x.write(d * gain.read().reshape(-1))
