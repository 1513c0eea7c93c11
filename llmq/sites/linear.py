"""A linear map: which products it is made of, and which copy of each operand they read."""

from __future__ import annotations

from typing import Any, NamedTuple

from llmq.tensor import COLSUM, Form, Ref


class Copies(NamedTuple):
    """Forms of an operand: `row` for products that sum over its last axis, `col` for those that sum over the others."""

    row: Form
    col: Form


class Linear:
    """y = x W^T + b, sums in f32, with operands read in the forms given for `x`, `d_y` and `weight`."""

    def __init__(self, x: Copies, d_y: Copies, weight: Copies) -> None:
        self.x, self.d_y, self.weight = x, d_y, weight

    def forward(self, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None = None) -> None:
        """y (...,N) <- x (...,K), w.weight (N,K), w.bias (N,) or None, residual (...,N) or None."""
        ops.linear_forward(y, x.as_form(self.x.row), w.weight.as_form(self.weight.row), w.bias, residual)

    def dgrad(self, ops: Any, d_x: Ref, d_y: Ref, w: Any) -> None:
        """d_x (...,K) <- d_y (...,N), w.weight (N,K)."""
        ops.linear_dgrad(d_x, d_y.as_form(self.d_y.row), w.weight.as_form(self.weight.col), None)

    def wgrad(self, ops: Any, dw: Any, d_y: Ref, x: Ref) -> None:
        """dw.weight (N,K), dw.bias (N,) <- d_y (...,N), x (...,K)."""
        ops.linear_wgrad(dw.weight, d_y.as_form(self.d_y.col), x.as_form(self.x.col))
        ops.bias_backward(dw.bias, d_y.as_form(COLSUM))

    def backward(self, ops: Any, a: Any, d: Any, d_x: Ref, dw: Any, d_y: Ref, x: Ref, w: Any) -> None:
        """d_x, dw <- d_y, x, w."""
        self.dgrad(ops, d_x, d_y, w)
        self.wgrad(ops, dw, d_y, x)
