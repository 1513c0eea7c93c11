"""LayerNorm (Ba et al., 2016): x = (res - mean) * rstd * weight + bias, rstd = 1 / sqrt(mean((res - mean)^2) + eps)."""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import op
from llmq.ops.temporaries import elementwise


@op(family="norms", forms={"x"}, sums=False, temporaries=elementwise("x", 2, "res"))
def layernorm_forward(
    x: Output, mean: Output, rstd: Output, /, res: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> None:
    """x (B,T,C), mean, rstd (B,T) <- res (B,T,C), weight (C,), bias (C,) or None."""
    r = res.read()
    m = np.mean(r, axis=-1)
    value = r - m[..., None]
    s = 1 / np.sqrt(np.mean(value * value, axis=-1) + r.dtype.type(eps))
    value *= s[..., None]
    value *= weight.read()
    if bias is not None:
        value += bias.read()
    x.write(value)
    mean.write(m)
    rstd.write(s)


@op(
    family="norms",
    shares={"d_out": "d_res"},
    forms={"d_out"},
    sums=False,
    temporaries=elementwise("d_out", 3, "d_x", held=1),
)
def layernorm_backward(
    d_out: Output,
    d_weight: Output,
    d_bias: Output,
    /,
    d_x: Tensor,
    d_res: Tensor | None,
    res: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
) -> None:
    """d_out (B,T,C), d_weight, d_bias (C,) <- d_x (B,T,C), d_res (B,T,C) or None, res, weight (C,), mean, rstd (B,T).

    d_out = d_res + rstd * (g - mean(g) - n * mean(g * n)) with n = (res - mean) * rstd and g = d_x * weight: the
    gradient that arrives through the residual path is added here. d_weight = sum over tokens of d_x * n, d_bias of d_x.
    """
    s = rstd.read()[..., None]
    n = res.read() - mean.read()[..., None]
    n *= s
    dx = d_x.read()
    d_weight.write((dx * n).reshape(-1, n.shape[-1]).sum(axis=0))
    d_bias.write(dx.reshape(-1, n.shape[-1]).sum(axis=0))
    d = dx * weight.read()
    along = np.mean(d * n, axis=-1, keepdims=True)
    d -= np.mean(d, axis=-1, keepdims=True)
    n *= along
    d -= n
    d *= s
    if d_res is not None:
        d += d_res.read()
    d_out.write(d)
