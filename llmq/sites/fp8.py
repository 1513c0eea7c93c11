"""A linear map whose three matmuls read fp8 operands.

Hopper's fp8 matmul takes both operands with the summed axis innermost, so each operand exists in up to two copies:
forward reads X and W as rows, dgrad dY as rows and W transposed, wgrad dY and X transposed. The copies come out of
their producers; nothing here quantizes.
"""

from dataclasses import dataclass

from llmq.sites.linear import Copies, Linear
from llmq.tensor import Form


@dataclass(frozen=True)
class Recipe:
    """How copies are scaled: row copies of activations and gradients, their transposed copies, both of the weight."""

    rows: str
    columns: str
    weight: str


# Tiles of a weight (128x128) turn over with it, so that both of its copies have the same scales.
# by the name of the recipe; with one scale per token, wgrad, which sums over tokens, reads copies with a single one
RECIPES = {
    "delayed": Recipe("delayed", "delayed", "delayed"),
    "current": Recipe("current", "current", "current"),
    "rowwise": Recipe("rowwise", "current", "rowwise"),
    "blockwise": Recipe("blockwise", "blockwise", "tilewise"),
}


class Fp8Linear(Linear):
    """y = x W^T + b; activations and weights in e4m3, gradients in `gradient_dtype`; `scaling` a key of RECIPES."""

    def __init__(self, name: str, gradient_dtype: str, scaling: str) -> None:
        by = RECIPES[scaling]
        super().__init__(
            name,
            x=Copies(Form("e4m3", "row", by.rows), Form("e4m3", "col", by.columns)),
            # Of their own dtype: e5m2 reaches further where a scale of earlier steps is too small.
            d_y=Copies(Form(gradient_dtype, "row", by.rows), Form(gradient_dtype, "col", by.columns)),
            weight=Copies(Form("e4m3", "row", by.weight), Form("e4m3", "col", by.weight)),
        )
