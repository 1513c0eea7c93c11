"""A linear map whose three matmuls read fp8 operands.

Hopper's fp8 matmul takes both operands with the summed axis innermost, so each operand exists in up to two copies:
forward reads X and W as rows, dgrad dY as rows and W transposed, wgrad dY and X transposed. The copies come out of
their producers; nothing here quantizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmq.tensor import COLSUM, Form, Ref


@dataclass(frozen=True)
class Scaling:
    """How copies are scaled: row copies of activations and gradients, their transposed copies, both of the weight."""

    rows: str
    columns: str
    weight: str


# by the name of the recipe; with one scale per token, wgrad, which sums over tokens, reads copies with a single one
SCALINGS = {
    "delayed": Scaling("delayed", "delayed", "delayed"),
    "current": Scaling("current", "current", "current"),
    "rowwise": Scaling("rowwise", "current", "rowwise"),
    "blockwise": Scaling("blockwise", "blockwise", "tilewise"),
}


class Fp8Linear:
    """y = x W^T + b; activations and weights in e4m3, gradients in `gradient_dtype`; `scaling` a key of SCALINGS."""

    def __init__(self, gradient_dtype: str, scaling: str) -> None:
        by = SCALINGS[scaling]
        self.row, self.col = Form("e4m3", "row", by.rows), Form("e4m3", "col", by.columns)
        self.d_row, self.d_col = Form(gradient_dtype, "row", by.rows), Form(gradient_dtype, "col", by.columns)
        self.w_row, self.w_col = Form("e4m3", "row", by.weight), Form("e4m3", "col", by.weight)

    def forward(self, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None = None) -> None:
        """y (...,N) <- x (...,K), w.weight (N,K), w.bias (N,) or None, residual (...,N) or None."""
        ops.linear_forward(y, x.as_form(self.row), w.weight.as_form(self.w_row), w.bias, residual)

    def dgrad(self, ops: Any, d_x: Ref, d_y: Ref, w: Any) -> None:
        """d_x (...,K) <- d_y (...,N), w.weight (N,K) transposed."""
        ops.linear_dgrad(d_x, d_y.as_form(self.d_row), w.weight.as_form(self.w_col))

    def wgrad(self, ops: Any, dw: Any, d_y: Ref, x: Ref) -> None:
        """dw.weight (N,K), dw.bias (N,) <- d_y (...,N) and x (...,K), both transposed."""
        ops.linear_wgrad(dw.weight, d_y.as_form(self.d_col), x.as_form(self.col))
        ops.bias_backward(dw.bias, d_y.as_form(COLSUM))

    def backward(self, ops: Any, a: Any, d: Any, d_x: Ref, dw: Any, d_y: Ref, x: Ref, w: Any) -> None:
        """d_x, dw <- d_y, x, w."""
        self.dgrad(ops, d_x, d_y, w)
        self.wgrad(ops, dw, d_y, x)
