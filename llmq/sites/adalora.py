"""A low-rank adapter in the form of a singular value decomposition: s B E A x, E diagonal (AdaLoRA; Zhang et al.,
"Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning", 2023).

The rows of each A and the columns of each B are kept near orthonormal: to the gradients that of weight times the sum of
|A A^T - I| and |B^T B - I| over all adapters is added, Frobenius norms as in PEFT, for each trained token of a
micro-batch: so it has that weight beside the mean loss, however the step is split.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmq.protocols import Ops, Parameters, Slots
from llmq.row import Part, Row
from llmq.sites.lora import LoraAdapter
from llmq.tensor import Ref, Slot


@dataclass(frozen=True)
class AdaLoraAdapter(LoraAdapter):
    """Adapters whose E are one row `lora_e` (sum of ranks,), held in `stat`."""

    stat: str = "fp32"
    orthogonality: float = 0.0

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """E A x (...,R) of all pieces beside A x; products (S,S) of the rows of A, or columns of a B, and what the
        regulariser's gradient multiplies these with."""
        key, sizes = self.key, {"a": self.rank, **{piece.key: piece.rank for piece in self.pieces}}
        found = [*super().slots(x), Slot(f"{key}.values", (*x.shape[:-1], self.rank), x.roles)]
        for name, size in sizes.items():
            found.append(Slot(f"{key}.gram_{name}", (size, size), (), "stat", of_weights=True))
            found.append(Slot(f"{key}.turn_{name}", (size, size), of_weights=True))
        return tuple(found)

    def rows(self, layer: int | None) -> Iterator[Row]:
        """A and E of all pieces, and the B of each, as PEFT names them."""
        for row in super().rows(layer):
            parts = (replace(part, name=part.name.removesuffix(".weight")) for part in row.parts)
            yield replace(row, parts=tuple(parts))
        values = tuple(Part(f"{piece.name}.lora_E", piece.first, piece.first + piece.rank) for piece in self.pieces)
        about = (f"{self.name}.lora_e", (self.rank,), values, "zeros", False)
        yield Row(*about, layer, dtype=self.stat, file=self.file, is_column=True)

    def down(self, ops: Ops, a: Slots, x: Ref, w: Parameters) -> Ref:
        """What B multiplies (...,R): a.values <- E a.low, a.low <- A x."""
        low, values = super().down(ops, a, x, w), a[f"{self.key}.values"]
        ops.scale_columns_forward(values, low, w.lora_e, None, None)
        return values

    def add_backward(self, ops: Ops, a: Slots, d: Slots, dw: Parameters, d_y: Ref, x: Ref, w: Parameters) -> None:
        """The gradients of A x (...,R), of A, E and B <- d_y (...,N), x (...,K)."""
        low, d_low = a[f"{self.key}.low"], d[f"{self.key}.low"]
        values, d_values = a[f"{self.key}.values"], d[f"{self.key}.values"]
        self.up_backward(ops, d_values, dw, d_y, values, w)
        ops.scale_columns_backward(d_low, dw.lora_e, d_values, low, w.lora_e)
        ops.linear_wgrad(dw.lora_a, d_low, x)
        for targets in _targets_of_first(a, x):
            self.keep_orthogonal(ops, d, dw, targets, w)

    def keep_orthogonal(self, ops: Ops, d: Slots, dw: Parameters, targets: Ref, w: Parameters) -> None:
        """The gradients of A and B <- those of the regulariser, for each trained one of the targets."""
        gram, turn = d[f"{self.key}.gram_a"], d[f"{self.key}.turn_a"]
        ops.linear_forward(gram, w.lora_a, w.lora_a, None, None)
        for piece in self.pieces:
            # A Gram matrix of all A at once, of which each piece reads its own block on the diagonal.
            own, first = turn.chunk(*piece.low), piece.first
            ops.orthogonality(own, gram, targets, first=first, weight=self.orthogonality, present=piece.present)
        ops.linear_dgrad(dw.lora_a, turn, w.lora_a, None)
        for piece in self.pieces:
            up, d_up = getattr(w.lora_b, piece.key), getattr(dw.lora_b, piece.key)
            gram, turn = d[f"{self.key}.gram_{piece.key}"], d[f"{self.key}.turn_{piece.key}"]
            ops.linear_wgrad(gram, up, up)
            ops.orthogonality(turn, gram, targets, first=0, weight=self.orthogonality, present=piece.present)
            ops.linear_forward(d_up, up, turn, None, None)


def _targets_of_first(a: Slots, x: Ref) -> list[Ref]:
    """The targets of the batch where x is its first tokens: the regulariser counts once in a batch that comes in chunks
    or in tiles. Else none."""
    return [a.batch.targets] if x.rows_before == a.res.rows_before == 0 else []
