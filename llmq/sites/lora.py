"""A low-rank adapter on a linear map: y = W x + b + s B A x (LoRA; Hu et al., 2021).

A fused site, such as q, k and v, has an adapter for each of its parts. Their A are one row `lora_a` (sum of ranks, K),
which reads x once; each B is a row `lora_b.q_proj` of its own and adds to its columns of y. All operands are read as
they are, whatever forms the site itself reads.

The adapter's product is written first where it fills y, and the site's own product adds to it: that takes longer to
compute than y to read, while a product of so few terms is as fast as memory. So it is with the gradient of x.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmq.row import Part, Row
from llmq.sites.linear import Linear
from llmq.tensor import Ref, Slot

FROM_ZERO = ("kaiming", "gaussian", "eva")  # inits with which B is zero
ONE_PASS = (16, 32)  # ranks whose gradients of B, and of what B multiplies, come of one pass over d_y
WHOLE = 8  # what places and widths are multiples of for that


def takes_one_pass(dtype: str, rank: int, *places: int) -> bool:
    """Whether `low_rank_backward` takes adapters of this rank in `dtype`, whose columns begin and end at `places`."""
    return dtype == "bf16" and rank in ONE_PASS and not any(place % WHOLE for place in places)


@dataclass(frozen=True)
class LowRank:
    """The adapter of a part of a site, known in files by `name`: columns [start, stop) of y, some of them padding.

    It has columns [first, first + rank) of the site's slot of A x, and multiplies by `scale`.
    """

    name: str
    key: str
    inputs: int
    outputs: int
    start: int
    stop: int
    first: int
    rank: int
    scale: float
    present: int = 0  # of AdaLoRA: leading rows of A that are there; others are zero, and stay so

    def columns(self, y: Ref) -> Ref:
        """Its columns of y (...,N)."""
        return _columns(y, self.start, self.stop - self.start)

    def low(self, low: Ref) -> Ref:
        """Its columns of A x (...,R)."""
        return _columns(low, self.first, self.rank)


def _columns(ref: Ref, start: int, count: int) -> Ref:
    return ref if count == ref.shape[-1] else ref.columns(start, count)


class LoraLinear:
    """The site `base` with adapters `pieces`, whose rows are kept in `file`.

    `init` says how A is drawn or made, B being zero, or of which part of the weight both are made. Values are of
    `dtype`.
    """

    def __init__(self, base: Linear, pieces: Sequence[LowRank], init: str, file: str, dtype: str) -> None:
        self.base, self.name, self.key = base, base.name, base.key
        self.pieces, self.init, self.file = tuple(pieces), init, file
        self.init_b = "zeros" if init in FROM_ZERO else init
        self.rank = sum(piece.rank for piece in pieces)
        self.dtype = dtype

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """A x (...,R) of all pieces, beside the slots of the base."""
        return (*self.base.slots(x), Slot(f"{self.key}.low", (*x.shape[:-1], self.rank), x.roles))

    def rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """The base's rows, A of all pieces, and the B of each."""
        own = self.base.rows(rows)
        layer = own[0].layer if own else None  # a tied head has no rows
        down = [Part(f"{p.name}.lora_A.weight", p.first, p.first + p.rank) for p in self.pieces]
        shape = (self.rank, self.pieces[0].inputs)
        found = [Row(f"{self.name}.lora_a", shape, tuple(down), self.init, True, layer, file=self.file)]
        for piece in self.pieces:
            up = Part(f"{piece.name}.lora_B.weight", 0, piece.outputs)
            name, shape = f"{self.name}.lora_b.{piece.key}", (piece.stop - piece.start, piece.rank)
            found.append(Row(name, shape, (up,), self.init_b, True, layer, file=self.file))
        return (*own, *found)

    def forward(self, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None = None) -> None:
        """y (...,N) <- x (...,K), w, residual (...,N) or None."""
        self.sum(ops, a, y, x, x, w, residual)

    def sum(self, ops: Any, a: Any, y: Ref, x: Ref, own: Ref, w: Any, residual: Ref | None) -> None:
        """y (...,N) <- W x + b + s B A own + residual (...,N) or None."""
        fills = sum(piece.stop - piece.start for piece in self.pieces) == y.shape[-1]
        if not fills:
            self.base.forward(ops, a, y, x, w, residual)
            residual = y
        low = self.down(ops, a, own, w)
        for piece in self.pieces:
            up, to = getattr(w.lora_b, piece.key), None if residual is None else piece.columns(residual)
            ops.linear_forward(piece.columns(y), piece.low(low), up, None, to, alpha=piece.scale)
        if fills:
            self.base.forward(ops, a, y, x, w, y)

    def down(self, ops: Any, a: Any, x: Ref, w: Any) -> Ref:
        """What B multiplies (...,R): a.low <- A x."""
        low: Ref = a[f"{self.key}.low"]
        ops.linear_forward(low, x, w.lora_a, None, None)
        return low

    def backward(self, ops: Any, a: Any, d: Any, d_x: Ref, dw: Any, d_y: Ref, x: Ref, w: Any) -> None:
        """d_x, dw <- d_y, x, w."""
        self.add_backward(ops, a, d, dw, d_y, x, w)
        ops.linear_dgrad(d_x, d[f"{self.key}.low"], w.lora_a, None)
        self.base.backward(ops, a, d, d_x, dw, d_y, x, w, d_x)

    def add_backward(self, ops: Any, a: Any, d: Any, dw: Any, d_y: Ref, x: Ref, w: Any) -> None:
        """d.low (...,R), gradients of A and B <- d_y (...,N), a.low, x (...,K)."""
        low, d_low = a[f"{self.key}.low"], d[f"{self.key}.low"]
        self.up_backward(ops, d_low, dw, d_y, low, w)
        ops.linear_wgrad(dw.lora_a, d_low, x)

    def up_backward(self, ops: Any, d_low: Ref, dw: Any, d_y: Ref, low: Ref, w: Any) -> None:
        """d_low (...,R), gradients of B <- d_y (...,N), low, what B multiplies."""
        for piece in self.pieces:
            out, up, d_up = piece.columns(d_y), getattr(w.lora_b, piece.key), getattr(dw.lora_b, piece.key)
            own, d_own = piece.low(low), piece.low(d_low)
            places = (piece.first, piece.start, piece.stop, self.rank, d_y.shape[-1])
            if takes_one_pass(self.dtype, piece.rank, *places):
                ops.low_rank_backward(d_own, d_up, out, own, up, alpha=piece.scale)
            else:
                ops.linear_dgrad(d_own, out, up, None, alpha=piece.scale)
                ops.linear_wgrad(d_up, out, own, alpha=piece.scale)


class DroppedLinear:
    """The site `lora` with dropout of the adapters' input: y = W x + b + s B A drop(x).

    Which inputs are left out is a function of seed, sample, position and site, so drop(x) is made again in backward
    and not kept. All parts of a fused site read the same drop(x).
    """

    def __init__(self, lora: LoraLinear, *, rate: float, seed: int) -> None:
        self.lora, self.name, self.key, self.rows = lora, lora.name, lora.key, lora.rows
        self.pieces, self.rank, self.file = lora.pieces, lora.rank, lora.file
        self.numbers = {"rate": rate, "seed": seed, "stream": zlib.crc32(f"dropout {self.name}".encode())}

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """drop(x) (...,K) of forward and of backward too."""
        own = (Slot(f"{self.key}.{name}", x.shape, x.roles) for name in ("dropped", "again"))
        return (*self.lora.slots(x), *own)

    def forward(self, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None = None) -> None:
        """y (...,N) <- x (...,K), w, residual (...,N) or None, a.batch.samples (B,)."""
        dropped = a[f"{self.key}.dropped"]
        ops.dropout(dropped, x, a.batch.samples, None, **self.place(x))
        self.lora.sum(ops, a, y, x, dropped, w, residual)

    def backward(self, ops: Any, a: Any, d: Any, d_x: Ref, dw: Any, d_y: Ref, x: Ref, w: Any) -> None:
        """d_x, dw <- d_y, x, w, a.batch.samples."""
        again, d_dropped = a[f"{self.key}.again"], d[f"{self.key}.dropped"]
        ops.dropout(again, x, a.batch.samples, None, **self.place(x))
        self.lora.add_backward(ops, a, d, dw, d_y, again, w)
        ops.linear_dgrad(d_dropped, d[f"{self.key}.low"], w.lora_a, None)
        ops.dropout(d_x, d_dropped, a.batch.samples, None, **self.place(x))
        self.lora.base.backward(ops, a, d, d_x, dw, d_y, x, w, d_x)

    def place(self, x: Ref) -> dict[str, Any]:
        """Numbers of the op: where x begins in the batch is the first token's place."""
        return {**self.numbers, "first": x.rows_before, "length": x.entire.shape[-2]}
