"""RMSNorm of what a sublayer adds to the stream (OLMo 2, Gemma 2, GLM-4)."""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.reference.rmsnorm import moved
from llmq.ops.seam import op
from llmq.ops.temporaries import elementwise


@op(
    family="norms",
    shares={"out": "residual"},
    forms={"out"},
    sums=False,
    temporaries=elementwise("out", 1, "x", "residual"),
)
def post_norm_forward(
    out: Output, rstd: Output, /, x: Tensor, weight: Tensor, residual: Tensor, *, eps: float, offset: float = 0.0
) -> None:
    """out (B,T,C), rstd (B,T) <- x (B,T,C), weight (C,), residual (B,T,C): residual + norm.

    out = residual + x * rstd * (weight + offset), rstd = 1 / sqrt(mean(x^2) + eps). Its gradient is
    rmsnorm_backward without d_res.
    """
    r = x.read()
    s = 1 / np.sqrt(np.mean(r * r, axis=-1) + r.dtype.type(eps))
    value = r * s[..., None]
    value *= moved(weight, offset)
    value += residual.read()
    out.write(value)
    rstd.write(s)
