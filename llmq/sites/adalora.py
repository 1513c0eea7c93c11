"""A low-rank adapter in the form of a singular value decomposition: y = W x + b + s B E A x, E diagonal (AdaLoRA; Zhang
et al., "Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning", 2023).

The rows of each A and the columns of each B are kept near orthonormal: to the gradients that of weight times the sum of
|A A^T - I| and |B^T B - I| over all adapters is added, Frobenius norms as in PEFT, for each trained token of a
micro-batch: so it has that weight beside the mean loss, however the step is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmq.row import Part, Row
from llmq.sites.linear import Linear
from llmq.sites.lora import LoraLinear, LowRank
from llmq.tensor import Ref, Slot


class AdaLoraLinear(LoraLinear):
    """The site `base` with adapters `pieces`, whose E are one row `lora_e` (sum of ranks,), held in `stat`."""

    def __init__(
        self,
        base: Linear,
        pieces: Sequence[LowRank],
        init: str,
        file: str,
        dtype: str,
        *,
        stat: str,
        orthogonality: float,
    ) -> None:
        super().__init__(base, pieces, init, file, dtype)
        self.stat, self.orthogonality = stat, orthogonality

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """E A x (...,R) of all pieces beside A x; products (S,S) of the rows of A, or columns of a B, and what the
        regulariser's gradient multiplies these with."""
        key, sizes = self.key, {"a": self.rank, **{piece.key: piece.rank for piece in self.pieces}}
        found = [*super().slots(x), Slot(f"{key}.values", (*x.shape[:-1], self.rank), x.roles)]
        for name, size in sizes.items():
            found.append(Slot(f"{key}.gram_{name}", (size, size), (), "stat", of_weights=True))
            found.append(Slot(f"{key}.turn_{name}", (size, size), of_weights=True))
        return tuple(found)

    def rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """The base's rows, A and E of all pieces, and the B of each, as PEFT names them."""
        found = []
        for row in super().rows(rows):
            if ".lora_" in row.name:
                parts = [Part(part.name.removesuffix(".weight"), part.start, part.stop) for part in row.parts]
                row = Row(row.name, row.shape, tuple(parts), self.init, True, row.layer, file=self.file)
            found.append(row)
        values = tuple(Part(f"{piece.name}.lora_E", piece.first, piece.first + piece.rank) for piece in self.pieces)
        about, layer = (f"{self.name}.lora_e", (self.rank,), values, "zeros", False), found[-1].layer
        return (*found, Row(*about, layer, dtype=self.stat, file=self.file, is_column=True))

    def down(self, ops: Any, a: Any, x: Ref, w: Any) -> Ref:
        """What B multiplies (...,R): a.values <- E a.low, a.low <- A x."""
        low, values = super().down(ops, a, x, w), a[f"{self.key}.values"]
        ops.scale_columns_forward(values, low, w.lora_e, None, None)
        return values

    def add_backward(self, ops: Any, a: Any, d: Any, dw: Any, d_y: Ref, x: Ref, w: Any) -> None:
        """The gradients of A x (...,R), of A, E and B <- d_y (...,N), x (...,K)."""
        low, d_low = a[f"{self.key}.low"], d[f"{self.key}.low"]
        values, d_values = a[f"{self.key}.values"], d[f"{self.key}.values"]
        self.up_backward(ops, d_values, dw, d_y, values, w)
        ops.scale_columns_backward(d_low, dw.lora_e, d_values, low, w.lora_e)
        ops.linear_wgrad(dw.lora_a, d_low, x)
        if x.rows_before == a.res.rows_before == 0:  # once, of a batch that comes in chunks, or in tiles
            self.keep_orthogonal(ops, d, dw, a.batch.targets, w)

    def keep_orthogonal(self, ops: Any, d: Any, dw: Any, targets: Ref, w: Any) -> None:
        """The gradients of A and B <- those of the regulariser, for each trained one of the targets."""
        gram, turn = d[f"{self.key}.gram_a"], d[f"{self.key}.turn_a"]
        ops.linear_forward(gram, w.lora_a, w.lora_a, None, None)
        for piece in self.pieces:
            own, about = turn.chunk(piece.first, piece.rank), {"weight": self.orthogonality, "present": piece.present}
            ops.orthogonality(own, gram, targets, first=piece.first, **about)
        ops.linear_dgrad(dw.lora_a, turn, w.lora_a, None)
        for piece in self.pieces:
            up, about = getattr(w.lora_b, piece.key), {"weight": self.orthogonality, "present": piece.present}
            gram, turn = d[f"{self.key}.gram_{piece.key}"], d[f"{self.key}.turn_{piece.key}"]
            ops.linear_wgrad(gram, up, up)
            ops.orthogonality(turn, gram, targets, first=0, **about)
            ops.linear_forward(getattr(dw.lora_b, piece.key), up, turn, None, None)
