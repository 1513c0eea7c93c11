"""Multiples, and soft-caps: values between -cap and cap (Gemma 2)."""

import math

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import op
from llmq.ops.temporaries import elementwise


@op(family="norms", shares={"y": "x"}, temporaries=elementwise("y", 1, "x", "residual"))
def scale(y: Output, /, x: Tensor, residual: Tensor | None, *, factor: float) -> None:
    """y (...,C) <- x (...,C), residual (...,C) or None: factor x + residual."""
    values = x.read()
    value = values * values.dtype.type(factor)
    y.write(value if residual is None else value + residual.read())


@op(family="cross-entropy", shares={"y": "x"}, temporaries=elementwise("y", 1, "x"))
def softcap_forward(y: Output, /, x: Tensor, *, cap: float, factor: float = 1.0) -> None:
    """y (...,V) <- x (...,V): cap tanh(factor x / cap), or factor x where the cap is infinite."""
    values = x.read() * factor
    y.write(values if math.isinf(cap) else cap * np.tanh(values / cap))


@op(family="cross-entropy", shares={"d_x": "d_y"}, temporaries=elementwise("d_x", 2, "d_y", "y"))
def softcap_backward(d_x: Output, /, d_y: Tensor, y: Tensor, *, cap: float, factor: float = 1.0) -> None:
    """d_x (...,V) <- d_y, y (...,V) of softcap_forward: factor d_y (1 - (y / cap)^2)."""
    value = d_y.read() * factor
    d_x.write(value if math.isinf(cap) else value * (1 - (y.read() / cap) ** 2))
