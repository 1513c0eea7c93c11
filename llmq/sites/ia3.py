"""Trained gains on a frozen map: y = l * (W x + b), or W (l * x) + b (IA3; Liu et al., "Few-Shot Parameter-Efficient
Fine-Tuning is Better and Cheaper than In-Context Learning", 2022).

The gains begin as ones and are held in `dtype`. In files they are columns of outputs, or a row of inputs, as in PEFT.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmq.protocols import Ops, Parameters, Slots
from llmq.row import HeadOrder, Part, Row
from llmq.sites.linear import Linear
from llmq.sites.outputs import fill_gains, gaps
from llmq.tensor import Ref, Slot


@dataclass(frozen=True)
class GainPiece:
    """The gains of outputs [start, stop) of a site, known in files by `name`."""

    name: str
    key: str
    start: int
    stop: int
    order: HeadOrder | None = None  # of outputs in files


class GainLinear:
    """The site `base`, which has `outputs` outputs, with gains on those of its pieces."""

    def __init__(self, base: Linear, pieces: Sequence[GainPiece], outputs: int, dtype: str, file: str) -> None:
        self.base, self.name, self.key = base, base.name, base.key
        self.pieces, self.outputs, self.dtype, self.file = tuple(pieces), outputs, dtype, file
        self.gaps = gaps(((piece.start, piece.stop - piece.start) for piece in pieces), outputs)

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """W x + b (...,N), and gains (N,), beside the slots of the base."""
        product = Slot(f"{self.key}.product", (*x.shape[:-1], self.outputs), ("block",))
        gain = Slot(f"{self.key}.gain", (self.outputs,), (), "stat", of_weights=True)
        return (*self.base.slots(x), product, gain)

    def rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """The base's rows, and the gains of each piece (N,)."""
        found = list(self.base.rows(rows))
        for piece in self.pieces:
            count, layer, name = piece.stop - piece.start, found[0].layer, f"{self.name}.ia3.{piece.key}"
            part = Part(f"{piece.name}.ia3_l", 0, count, piece.order)
            # A vector here, as kernels read gains in pairs; PEFT's files have a column, (N,1).
            row = Row(name, (count,), (part,), "ones", False, layer, dtype=self.dtype, file=self.file)
            found.append(replace(row, is_column=True))
        return tuple(found)

    def forward(self, ops: Ops, a: Slots, y: Ref, x: Ref, w: Parameters, residual: Ref | None = None) -> None:
        """y (...,N) <- x (...,K), w, residual (...,N) or None."""
        product, gain = a[f"{self.key}.product"], a[f"{self.key}.gain"]
        self.base.forward(ops, a, product, x, w)
        fill_gains(ops, gain, self.gaps)
        for piece in self.pieces:
            # The op of DoRA's gains without a norm: what is left is the gain itself.
            at, own = gain.flat(piece.start, piece.stop - piece.start), getattr(w.ia3, piece.key)
            ops.output_gain(at, None, None, None, None, None, own, scale=1.0, first=0)
        ops.scale_columns_forward(y, product, gain, None, residual)

    def backward(self, ops: Ops, a: Slots, d: Slots, d_x: Ref, dw: Parameters, d_y: Ref, x: Ref, w: Parameters) -> None:
        """d_x, dw <- d_y, x, w."""
        product, gain = a[f"{self.key}.product"], a[f"{self.key}.gain"]
        d_product, d_gain = d[f"{self.key}.product"], d[f"{self.key}.gain"]
        ops.scale_columns_backward(d_product, d_gain, d_y, product, gain)
        for piece in self.pieces:
            at = d_gain.flat(piece.start, piece.stop - piece.start)
            ops.output_gain_backward(getattr(dw.ia3, piece.key), at, None)
        self.base.backward(ops, a, d, d_x, dw, d_product, x, w)


class InputGainLinear:
    """The site `base` with gains on its inputs, known in files by `part`."""

    def __init__(self, base: Linear, part: str, inputs: int, dtype: str, file: str) -> None:
        self.base, self.name, self.key = base, base.name, base.key
        self.part, self.inputs, self.dtype, self.file = part, inputs, dtype, file

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """l * x (...,K), beside the slots of the base."""
        return (*self.base.slots(x), Slot(f"{self.key}.scaled", x.shape, x.roles))

    def rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """The base's rows, and the gains (1,K)."""
        own = self.base.rows(rows)
        about, part = (f"{self.name}.ia3", (1, self.inputs)), Part(f"{self.part}.ia3_l", 0, 1)
        return (*own, Row(*about, (part,), "ones", False, own[0].layer, dtype=self.dtype, file=self.file))

    def forward(self, ops: Ops, a: Slots, y: Ref, x: Ref, w: Parameters, residual: Ref | None = None) -> None:
        """y (...,N) <- x (...,K), w, residual (...,N) or None."""
        scaled = a[f"{self.key}.scaled"]
        # Scaling x is scaling columns of W: the base stays in its form, in 4 bits, too.
        ops.scale_columns_forward(scaled, x, w.ia3, None, None)
        self.base.forward(ops, a, y, scaled, w, residual)

    def backward(self, ops: Ops, a: Slots, d: Slots, d_x: Ref, dw: Parameters, d_y: Ref, x: Ref, w: Parameters) -> None:
        """d_x, dw <- d_y, x, w."""
        scaled, d_scaled = a[f"{self.key}.scaled"], d[f"{self.key}.scaled"]
        self.base.backward(ops, a, d, d_scaled, dw, d_y, scaled, w)
        ops.scale_columns_backward(d_x, dw.ia3, d_scaled, x, w.ia3)
