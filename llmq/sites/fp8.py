"""A linear map whose three matmuls read fp8 operands.

Hopper's fp8 matmul takes both operands with the summed axis innermost, so each operand exists in up to two copies:
forward reads X and W as rows, dgrad dY as rows and W transposed, wgrad dY and X transposed. The copies come out of
their producers; nothing here quantizes.
"""

from __future__ import annotations

from typing import Any

from llmq.tensor import COLSUM, Form, Ref


class Fp8Linear:
    """y = x W^T + b; activations and weights in e4m3, gradients in `gradient_dtype` (e4m3 or e5m2)."""

    def __init__(self, gradient_dtype: str, scaling: str) -> None:
        self.row, self.col = Form("e4m3", "row", scaling), Form("e4m3", "col", scaling)
        self.d_row, self.d_col = Form(gradient_dtype, "row", scaling), Form(gradient_dtype, "col", scaling)

    def forward(self, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None = None) -> None:
        """y (...,N) <- x (...,K), w.weight (N,K), w.bias (N,) or None, residual (...,N) or None."""
        ops.linear_forward(y, x.as_form(self.row), w.weight.as_form(self.row), w.bias, residual)

    def dgrad(self, ops: Any, d_x: Ref, d_y: Ref, w: Any) -> None:
        """d_x (...,K) <- d_y (...,N), w.weight (N,K) transposed."""
        ops.linear_dgrad(d_x, d_y.as_form(self.d_row), w.weight.as_form(self.col))

    def wgrad(self, ops: Any, dw: Any, d_y: Ref, x: Ref) -> None:
        """dw.weight (N,K), dw.bias (N,) <- d_y (...,N) and x (...,K), both transposed."""
        ops.linear_wgrad(dw.weight, d_y.as_form(self.d_col), x.as_form(self.col))
        ops.bias_backward(dw.bias, d_y.as_form(COLSUM))

    def backward(self, ops: Any, a: Any, d: Any, d_x: Ref, dw: Any, d_y: Ref, x: Ref, w: Any) -> None:
        """d_x, dw <- d_y, x, w."""
        self.dgrad(ops, d_x, d_y, w)
        self.wgrad(ops, dw, d_y, x)
