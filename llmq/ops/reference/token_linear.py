"""The linear maps of one token at a time, with what comes before and after them: generation's, made by a pass."""

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.reference.linear import linear_forward
from llmq.ops.reference.rmsnorm import rmsnorm_forward
from llmq.ops.reference.swiglu import swiglu_forward
from llmq.ops.seam import op
from llmq.ops.temporaries import product
from llmq.tensor import DTYPES


# NumPy needs what the linear map needs, and what lies before and after it.
@op(family="linears forward", temporaries=lambda a: product("y", "x", "weight")(a) + 4 * a.size("x") + 6 * a.size("y"))
def token_linear(
    y: Output,
    /,
    x: Tensor,
    norm: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    eps: float,
    gated: bool,
) -> None:
    """y (B,1,N) <- x (B,1,K), norm (K,) or None, weight (N,K), bias (N,) or None, residual (B,1,N) or None.

    rmsnorm_forward with the weight `norm`, linear_forward, and, if `gated`, swiglu_forward of its 2N columns, without
    a residual. What is between them is rounded to the dtype of y, as it would be in a slot. No program that reads a
    weight here may write it.
    """
    assert residual is None or not gated
    if not y.wanted:
        return
    if norm is not None:
        normed, unwanted = _slot(x.shape, y.dtype), Output("rstd", x.shape[:-1], y.dtype, ())
        rmsnorm_forward(normed, unwanted, x, norm, eps=eps)
        (x,) = normed.tensors
    product = _slot((*x.shape[:-1], weight.shape[0]), y.dtype) if gated else y
    linear_forward(product, x, weight, bias, residual)
    if gated:
        swiglu_forward(y, *product.tensors)


def _slot(shape: tuple[int, ...], dtype: str) -> Output:
    """Memory for a value in between."""
    return Output("between", shape, dtype, (Tensor("between", np.empty(shape, DTYPES[dtype]), shape),))
