"""RMSNorm (Zhang and Sennrich, 2019): x = res * rstd * (weight + offset), rstd = 1 / sqrt(mean(res^2) + eps).

The offset is 0, or 1 for weights that begin at 0 (Gemma).
"""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import op
from llmq.ops.temporaries import elementwise


@op(family="norms", forms={"x"}, sums=False, temporaries=elementwise("x", 2, "res"))
def rmsnorm_forward(
    x: Output, rstd: Output, /, res: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0
) -> None:
    """x (B,T,C), rstd (B,T) <- res (B,T,C), weight (C,)."""
    r = res.read()
    s = 1 / np.sqrt(np.mean(r * r, axis=-1) + r.dtype.type(eps))
    x.write(r * s[..., None] * moved(weight, offset))
    rstd.write(s)


@op(
    family="norms",
    shares={"d_out": "d_res"},
    forms={"d_out"},
    sums=False,
    temporaries=elementwise("d_out", 4, "d_x", held=3),
)
def rmsnorm_backward(
    d_out: Output,
    d_weight: Output,
    /,
    d_x: Tensor,
    d_res: Tensor | None,
    res: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    offset: float = 0.0,
) -> None:
    """d_out (B,T,C), d_weight (C,) <- d_x (B,T,C), d_res (B,T,C) or None, res (B,T,C), weight (C,), rstd (B,T).

    d_out = d_res + rstd * (g - n * mean(g * n)) with n = res * rstd and g = d_x * (weight + offset): the gradient that
    arrives through the residual path is added here. d_weight = sum over tokens of d_x * n.
    """
    n = res.read() * rstd.read()[..., None]
    dx = d_x.read()
    g = dx * moved(weight, offset)
    d = rstd.read()[..., None] * (g - n * np.mean(g * n, axis=-1, keepdims=True))
    if d_res is not None:
        d = d + d_res.read()
    d_weight.write((dx * n).reshape(-1, n.shape[-1]).sum(axis=0))
    d_out.write(d)


def moved(weight: Tensor, offset: float) -> np.ndarray:
    """weight + offset, as ops compute with it."""
    w = weight.read()
    return w + w.dtype.type(offset) if offset else w
