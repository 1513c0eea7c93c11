"""A low-rank adapter with magnitudes: y = m (W x + s B A x) / |W + s B A| + b, row by row (DoRA; Liu et al., 2024).

The norm is that of the rows of W + s B A, and passes no gradient, as in PEFT. It is made of P = W A^T and G = A A^T,
which cost a thin product each. Of parts of a fused site that have no adapter the output is not scaled. With dropout
only what the adapter reads is left out; PEFT leaves it out of W x too, and multiplies with W twice.
"""

from collections.abc import Sequence
from typing import Any

from llmq.protocols import Ops, Parameters, Slots
from llmq.row import Part, Row
from llmq.sites.adapted import AdaptedLinear
from llmq.sites.lora import LoraAdapter
from llmq.sites.outputs import fill_gains, gaps
from llmq.tensor import COLSUM, Ref, Slot


class WithoutBias:
    """The bundle of a site's rows, or of their gradients, as that of a map that has no bias."""

    bias = None

    def __init__(self, bundle: Parameters) -> None:
        self._bundle = bundle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bundle, name)


class DoraLinear:
    """The site `base`, whose adapter is `lora`, perhaps with dropout, with a magnitude for each output of its pieces,
    held in `dtype`."""

    def __init__(self, base: AdaptedLinear, lora: LoraAdapter, dtype: str) -> None:
        self.base, self.lora, self.name, self.key, self.dtype = base, lora, base.name, base.key, dtype
        self.gaps = gaps((piece.columns for piece in lora.pieces), lora.outputs)

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """W x + s B A x (...,N), and of the rows of W: P (N,R), G (R,R), norms and gains (N,)."""
        key, n, r = self.key, self.lora.outputs, self.lora.rank
        return (
            *self.base.slots(x),
            Slot(f"{key}.product", (*x.shape[:-1], n), ("block",)),
            # What norms are made of is never as large as W + s B A itself.
            Slot(f"{key}.through", (n, r), (), "stat", of_weights=True),
            Slot(f"{key}.gram", (r, r), (), "stat", of_weights=True),
            Slot(f"{key}.norm", (n,), (), "stat", of_weights=True),
            Slot(f"{key}.gain", (n,), (), "stat", of_weights=True),
        )

    def rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Those of the adapter, and the magnitudes of each piece."""
        found = list(self.base.rows(rows))
        for piece in self.lora.pieces:
            part = Part(f"{piece.name}.lora_magnitude_vector", 0, piece.outputs, piece.order)
            shape, layer, name = (piece.stop - piece.start,), found[0].layer, f"{self.name}.lora_m.{piece.key}"
            found.append(Row(name, shape, (part,), "norms", False, layer, dtype=self.dtype, file=self.lora.file))
        return tuple(found)

    def forward(self, ops: Ops, a: Slots, y: Ref, x: Ref, w: Parameters, residual: Ref | None = None) -> None:
        """y (...,N) <- x (...,K), w, residual (...,N) or None."""
        # The bias is not scaled, so it joins after the gains.
        product = a[f"{self.key}.product"]
        self.measure(ops, a, w)
        self.base.forward(ops, a, product, x, WithoutBias(w))
        ops.scale_columns_forward(y, product, a[f"{self.key}.gain"], w.bias, residual)

    def measure(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.norm, a.gain (N,) <- w."""
        through, gram, norm, gain = (a[f"{self.key}.{name}"] for name in ("through", "gram", "norm", "gain"))
        ops.linear_forward(through, w.weight, w.lora_a, None, None)
        ops.linear_forward(gram, w.lora_a, w.lora_a, None, None)
        fill_gains(ops, gain, self.gaps)
        for piece in self.lora.pieces:
            at = piece.columns
            ops.output_gain(
                gain.flat(*at),
                norm.flat(*at),
                w.weight.chunk(*at),
                through.chunk(*at),
                gram,
                getattr(w.lora_b, piece.key),
                getattr(w.lora_m, piece.key),
                scale=piece.scale,
                first=piece.first,
            )

    def backward(self, ops: Ops, a: Slots, d: Slots, d_x: Ref, dw: Parameters, d_y: Ref, x: Ref, w: Parameters) -> None:
        """d_x, dw <- d_y, x, w."""
        product, gain, norm = (a[f"{self.key}.{name}"] for name in ("product", "gain", "norm"))
        d_product, d_gain = d[f"{self.key}.product"], d[f"{self.key}.gain"]
        ops.scale_columns_backward(d_product, d_gain, d_y, product, gain)
        for piece in self.lora.pieces:
            at = piece.columns
            ops.output_gain_backward(getattr(dw.lora_m, piece.key), d_gain.flat(*at), norm.flat(*at))
        # Of d_y, which the bias was added to; the map below sees d_product.
        ops.bias_backward(dw.bias, d_y.as_form(COLSUM))
        self.base.backward(ops, a, d, d_x, WithoutBias(dw), d_product, x, WithoutBias(w))
