"""The linear map y = x weight^T + bias, its two gradients, and the gradient of the bias."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from llmq.operands import Output, Tensor
from llmq.ops.seam import Arguments, Function, op
from llmq.ops.temporaries import product


def _multiply_adds(call: Arguments) -> int:
    """x (M,K) weight (N,K): M N K."""
    return math.prod(call.reads["x"].shape) * call.reads["weight"].shape[0]


def gradient_multiply_adds(call: Arguments) -> int:
    """d_y (M,N) weight (N,K), or d_y (M,N) x (M,K): M N K."""
    d_y, other = list(call.reads.values())[:2]
    return math.prod(d_y.shape) * other.shape[-1]


def _product(left: np.ndarray, right: np.ndarray, alpha: float) -> np.ndarray:
    value = left @ right
    return value if alpha == 1 else value * value.dtype.type(alpha)


def _linear(**more: Any) -> Callable[[Function], Function]:
    """`op` of a product with a weight, or of one that makes a weight's gradient."""
    return op(is_linear=True, takes_columns=True, products=1, **more)


@_linear(family="linears forward", multiply_adds=_multiply_adds, temporaries=product("y", "x", "weight"))
def linear_forward(
    y: Output, /, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *, alpha: float = 1.0
) -> None:
    """y (...,N) <- x (...,K), weight (N,K), bias (N,) or None, residual (...,N) or None: alpha x W^T + both.

    The residual may be the memory of y. Of all three maps, operands and result may be columns of a wider matrix.
    """
    value = _product(x.read().reshape(-1, x.shape[-1]), weight.read().T, alpha)
    if bias is not None:
        value += bias.read()
    if residual is not None:
        value += residual.read().reshape(value.shape)
    y.write(value.reshape(y.shape))


@_linear(family="linears dgrad", multiply_adds=gradient_multiply_adds, temporaries=product("d_x", "d_y", "weight"))
def linear_dgrad(d_x: Output, /, d_y: Tensor, weight: Tensor, residual: Tensor | None, *, alpha: float = 1.0) -> None:
    """d_x (...,K) <- d_y (...,N), weight (N,K), residual (...,K) or None: alpha d_y weight + residual.

    The residual may be the memory of d_x.
    """
    value = _product(d_y.read().reshape(-1, d_y.shape[-1]), weight.read(), alpha)
    if residual is not None:
        value += residual.read().reshape(value.shape)
    d_x.write(value.reshape(d_x.shape))


@_linear(family="linears wgrad", multiply_adds=gradient_multiply_adds, temporaries=product("d_weight", "d_y", "x"))
def linear_wgrad(d_weight: Output, /, d_y: Tensor, x: Tensor, *, alpha: float = 1.0) -> None:
    """d_weight (N,K) <- d_y (...,N), x (...,K): alpha d_y^T x, a sum over all leading axes."""
    d_weight.write(_product(d_y.read().reshape(-1, d_y.shape[-1]).T, x.read().reshape(-1, x.shape[-1]), alpha))


@op(family="linears wgrad")
def bias_backward(d_bias: Output, /, d_y: Tensor) -> None:
    """d_bias (N,) <- d_y (...,N) in colsum form, read as its (parts,N) partial sums."""
    partial = d_y.read()
    d_bias.write(partial.reshape(-1, partial.shape[-1]).sum(axis=0))
