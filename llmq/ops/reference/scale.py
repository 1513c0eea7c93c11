"""Multiples, and soft-caps: values between -cap and cap (Gemma 2)."""

import math

import numpy as np

from llmq.operands import Output, Tensor, slices
from llmq.ops.seam import op
from llmq.ops.temporaries import elementwise


@op(family="norms", shares={"y": "x"}, rows={"y"}, temporaries=elementwise("y", 1, "x", "residual"))
def scale(y: Output, /, x: Tensor, residual: Tensor | None, *, factor: float) -> None:
    """y (...,C) <- x (...,C), residual (...,C) or None: factor x + residual."""
    values = x.read()
    value = values * values.dtype.type(factor)
    y.write(value if residual is None else value + residual.read())


@op(family="cross-entropy", shares={"y": "x"})
def softcap_forward(y: Output, /, x: Tensor, *, cap: float, factor: float = 1.0) -> None:
    """y (...,V) <- x (...,V): cap tanh(factor x / cap), or factor x where the cap is infinite."""
    for start, count in slices(x.shape):
        values = x.chunk(start, count).read() * factor
        y.chunk(start, count).write(values if math.isinf(cap) else cap * np.tanh(values / cap))


@op(family="cross-entropy", shares={"d_x": "d_y"}, rows={"d_x"})
def softcap_backward(d_x: Output, /, d_y: Tensor, y: Tensor | None, *, cap: float, factor: float = 1.0) -> None:
    """d_x (...,V) <- d_y, y (...,V) of softcap_forward: factor d_y (1 - (y / cap)^2); y is not read where the cap is
    infinite."""
    for start, count in slices(d_y.shape):
        value = d_y.chunk(start, count).read() * factor
        if y is not None and not math.isinf(cap):
            value *= 1 - (y.chunk(start, count).read() / cap) ** 2
        d_x.chunk(start, count).write(value)
