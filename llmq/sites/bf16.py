"""A linear map in one plain float dtype (bf16, or fp32 and fp64 for exactness)."""

from __future__ import annotations

from typing import Any

from llmq.tensor import COLSUM, Form, Ref


class Bf16Linear:
    """y = x W^T + b with every operand read in `dtype`; sums in f32."""

    def __init__(self, dtype: str = "bf16") -> None:
        self.form = Form(dtype)

    def forward(self, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None = None) -> None:
        """y (...,N) <- x (...,K), w.weight (N,K), w.bias (N,) or None, residual (...,N) or None."""
        ops.linear_forward(y, x.as_form(self.form), w.weight.as_form(self.form), w.bias, residual)

    def dgrad(self, ops: Any, d_x: Ref, d_y: Ref, w: Any) -> None:
        """d_x (...,K) <- d_y (...,N), w.weight (N,K)."""
        ops.linear_dgrad(d_x, d_y.as_form(self.form), w.weight.as_form(self.form))

    def wgrad(self, ops: Any, dw: Any, d_y: Ref, x: Ref) -> None:
        """dw.weight (N,K), dw.bias (N,) <- d_y (...,N), x (...,K)."""
        ops.linear_wgrad(dw.weight, d_y.as_form(self.form), x.as_form(self.form))
        ops.bias_backward(dw.bias, d_y.as_form(COLSUM))

    def backward(self, ops: Any, a: Any, d: Any, d_x: Ref, dw: Any, d_y: Ref, x: Ref, w: Any) -> None:
        """d_x, dw <- d_y, x, w."""
        self.dgrad(ops, d_x, d_y, w)
        self.wgrad(ops, dw, d_y, x)
