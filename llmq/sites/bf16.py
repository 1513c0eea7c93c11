"""A linear map in one plain float dtype (bf16, or fp32 and fp64 for exactness)."""

from __future__ import annotations

from llmq.sites.linear import Copies, Linear
from llmq.tensor import Form


class Bf16Linear(Linear):
    """y = x W^T + b with every operand read as the plain value, in `dtype`."""

    def __init__(self, name: str, dtype: str = "bf16") -> None:
        one = Copies(Form(dtype), Form(dtype))
        super().__init__(name, x=one, d_y=one, weight=one)
