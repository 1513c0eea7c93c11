"""A linear map: which products it is made of, and which copy of each operand they read."""

from collections.abc import Sequence
from typing import NamedTuple

from llmq.protocols import Ops, Parameters, Slots
from llmq.row import Row
from llmq.tensor import COLSUM, Form, Ref, Slot


class Copies(NamedTuple):
    """Forms of an operand: `row` for products that sum over its last axis, `col` for those that sum over the others."""

    row: Form
    col: Form


class Linear:
    """y = x W^T + b, sums in f32, with operands read in the forms given for `x`, `d_y` and `weight`.

    A site is known by its place, `layers.3.mlp.up` or `head`. Its `key` is the last part of that, with which the names
    of its own slots begin; a block hands it the bundle `w.up` of its own rows.
    """

    def __init__(self, name: str, x: Copies, d_y: Copies, weight: Copies) -> None:
        self.name, self.key = name, name.rpartition(".")[2]
        self.x, self.d_y, self.weight = x, d_y, weight

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """Slots of the site's own, such as `up.low`, for an input `x`, whose roles they have."""
        return ()

    def rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """The parameter rows of the site, of which the model has `rows`: weight and bias."""
        return tuple(rows)

    def forward(self, ops: Ops, a: Slots, y: Ref, x: Ref, w: Parameters, residual: Ref | None = None) -> None:
        """y (...,N) <- x (...,K), w.weight (N,K), w.bias (N,) or None, residual (...,N) or None."""
        ops.linear_forward(y, x.as_form(self.x.row), w.weight.as_form(self.weight.row), w.bias, residual)

    def backward(
        self,
        ops: Ops,
        a: Slots,
        d: Slots,
        d_x: Ref,
        dw: Parameters,
        d_y: Ref,
        x: Ref,
        w: Parameters,
        residual: Ref | None = None,
    ) -> None:
        """d_x (...,K), dw.weight (N,K), dw.bias (N,) <- d_y (...,N), x (...,K), w.weight, residual (...,K) or None."""
        # fp8 matmuls want the summed axis innermost, so dgrad reads W transposed, and wgrad d_y and x.
        ops.linear_dgrad(d_x, d_y.as_form(self.d_y.row), w.weight.as_form(self.weight.col), residual)
        ops.linear_wgrad(dw.weight, d_y.as_form(self.d_y.col), x.as_form(self.x.col))
        # The producer of d_y sums its columns in the same pass; without a bias this form is not wanted, and not made.
        ops.bias_backward(dw.bias, d_y.as_form(COLSUM))


class Bf16Linear(Linear):
    """y = x W^T + b with every operand read as the plain value, in `dtype`: bf16, or fp32 and fp64 for exactness."""

    def __init__(self, name: str, dtype: str = "bf16") -> None:
        one = Copies(Form(dtype), Form(dtype))
        super().__init__(name, x=one, d_y=one, weight=one)
