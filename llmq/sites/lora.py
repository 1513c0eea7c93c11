"""A low-rank adapter on a linear map: y = W x + b + s B A x (LoRA; Hu et al., 2021).

A fused site, such as q, k and v, has an adapter for each of its parts. Their A are one row `lora_a` (sum of ranks, K),
which reads x once; each B is a row `lora_b.q_proj` of its own and adds to its columns of y. All operands are read as
they are, whatever forms the site itself reads.

The adapter's product is written first where it fills y, and the site's own product adds to it: that takes longer to
compute than y to read, while a product of so few terms is as fast as memory. So it is with the gradient of x.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
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
        return (*own, *self.own_rows(layer))

    def own_rows(self, layer: int | None) -> Iterator[Row]:
        """A of all pieces, and the B of each."""
        down = [Part(f"{p.name}.lora_A.weight", p.first, p.first + p.rank) for p in self.pieces]
        shape = (self.rank, self.pieces[0].inputs)
        yield Row(f"{self.name}.lora_a", shape, tuple(down), self.init, True, layer, file=self.file)
        for piece in self.pieces:
            up = Part(f"{piece.name}.lora_B.weight", 0, piece.outputs)
            name, shape = f"{self.name}.lora_b.{piece.key}", (piece.stop - piece.start, piece.rank)
            yield Row(name, shape, (up,), self.init_b, True, layer, file=self.file)

    def forward(self, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None = None) -> None:
        """y (...,N) <- x (...,K), w, residual (...,N) or None."""
        with_base(self, self.base, ops, a, y, x, w, residual)

    def backward(self, ops: Any, a: Any, d: Any, d_x: Ref, dw: Any, d_y: Ref, x: Ref, w: Any) -> None:
        """d_x, dw <- d_y, x, w."""
        self.adapt_backward(ops, a, d, d_x, dw, d_y, x, w, None)
        self.base.backward(ops, a, d, d_x, dw, d_y, x, w, d_x)

    def fills(self, y: Ref) -> bool:
        """Whether its pieces have all columns of y."""
        return sum(piece.stop - piece.start for piece in self.pieces) == y.shape[-1]

    def adapt(self, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None) -> None:
        """The pieces' columns of y (...,N) <- s B A x + those of residual (...,N) or None."""
        low = self.down(ops, a, x, w)
        for piece in self.pieces:
            up, to = getattr(w.lora_b, piece.key), None if residual is None else piece.columns(residual)
            ops.linear_forward(piece.columns(y), piece.low(low), up, None, to, alpha=piece.scale)

    def down(self, ops: Any, a: Any, x: Ref, w: Any) -> Ref:
        """What B multiplies (...,R): a.low <- A x."""
        low: Ref = a[f"{self.key}.low"]
        ops.linear_forward(self.own(low), x, w.lora_a, None, None)
        return low

    def own(self, low: Ref) -> Ref:
        """Its columns of the slot of A x, which may be wider."""
        return _columns(low, 0, self.rank)

    def adapt_backward(
        self, ops: Any, a: Any, d: Any, d_x: Ref, dw: Any, d_y: Ref, x: Ref, w: Any, residual: Ref | None
    ) -> None:
        """d_x (...,K), gradients of A and B <- d_y (...,N), a.low, x (...,K), residual (...,K) or None."""
        self.add_backward(ops, a, d, dw, d_y, x, w)
        ops.linear_dgrad(d_x, self.own(d[f"{self.key}.low"]), w.lora_a, residual)

    def add_backward(self, ops: Any, a: Any, d: Any, dw: Any, d_y: Ref, x: Ref, w: Any) -> None:
        """d.low (...,R), gradients of A and B <- d_y (...,N), a.low, x (...,K)."""
        low, d_low = a[f"{self.key}.low"], d[f"{self.key}.low"]
        self.up_backward(ops, d_low, dw, d_y, low, w)
        ops.linear_wgrad(dw.lora_a, self.own(d_low), x)

    def up_backward(self, ops: Any, d_low: Ref, dw: Any, d_y: Ref, low: Ref, w: Any) -> None:
        """d_low (...,R), gradients of B <- d_y (...,N), low, what B multiplies."""
        for piece in self.pieces:
            out, up, d_up = piece.columns(d_y), getattr(w.lora_b, piece.key), getattr(dw.lora_b, piece.key)
            own, d_own = piece.low(low), piece.low(d_low)
            places = (piece.first, piece.start, piece.stop, low.shape[-1], d_y.shape[-1])
            if takes_one_pass(self.dtype, piece.rank, *places):
                ops.low_rank_backward(d_own, d_up, out, own, up, alpha=piece.scale)
            else:
                ops.linear_dgrad(d_own, out, up, None, alpha=piece.scale)
                ops.linear_wgrad(d_up, out, own, alpha=piece.scale)


def with_base(adapter: Any, base: Linear, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None) -> None:
    """y (...,N) <- W x + b + what `adapter` makes of x + residual (...,N) or None."""
    fills = adapter.fills(y)
    if not fills:
        base.forward(ops, a, y, x, w, residual)
        residual = y
    adapter.adapt(ops, a, y, x, w, residual)
    if fills:
        base.forward(ops, a, y, x, w, y)


def dropped_slots(key: str, x: Slot) -> tuple[Slot, ...]:
    """drop(x) (...,K) of forward and of backward, at the site of a key."""
    return tuple(Slot(f"{key}.{name}", x.shape, x.roles) for name in ("dropped", "again"))


class DroppedLinear:
    """The site `lora` with dropout of the adapters' input: y = W x + b + s B A drop(x).

    Which inputs are left out is a function of seed, sample, position and site, so drop(x) is made again in backward
    and not kept. All parts of a fused site read the same drop(x).
    """

    def __init__(self, lora: LoraLinear, *, rate: float, seed: int) -> None:
        self.lora, self.name, self.key, self.rows = lora, lora.name, lora.key, lora.rows
        self.pieces, self.rank, self.file = lora.pieces, lora.rank, lora.file
        self.fills, self.own_rows = lora.fills, lora.own_rows
        self.numbers = {"rate": rate, "seed": seed, "stream": zlib.crc32(f"dropout {self.name}".encode())}

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """drop(x) (...,K) of forward and of backward too."""
        return (*self.lora.slots(x), *dropped_slots(self.key, x))

    def forward(self, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None = None) -> None:
        """y (...,N) <- x (...,K), w, residual (...,N) or None, a.batch.samples (B,)."""
        with_base(self, self.lora.base, ops, a, y, x, w, residual)

    def backward(self, ops: Any, a: Any, d: Any, d_x: Ref, dw: Any, d_y: Ref, x: Ref, w: Any) -> None:
        """d_x, dw <- d_y, x, w, a.batch.samples."""
        self.adapt_backward(ops, a, d, d_x, dw, d_y, x, w, None)
        self.lora.base.backward(ops, a, d, d_x, dw, d_y, x, w, d_x)

    def adapt(self, ops: Any, a: Any, y: Ref, x: Ref, w: Any, residual: Ref | None) -> None:
        """The pieces' columns of y (...,N) <- s B A drop(x) + those of residual (...,N) or None."""
        dropped = a[f"{self.key}.dropped"]
        ops.dropout(dropped, x, a.batch.samples, None, **self.place(x))
        self.lora.adapt(ops, a, y, dropped, w, residual)

    def adapt_backward(
        self, ops: Any, a: Any, d: Any, d_x: Ref, dw: Any, d_y: Ref, x: Ref, w: Any, residual: Ref | None
    ) -> None:
        """d_x (...,K), gradients of A and B <- d_y (...,N), a.low, x (...,K), residual (...,K) or None."""
        again, d_dropped = a[f"{self.key}.again"], d[f"{self.key}.dropped"]
        ops.dropout(again, x, a.batch.samples, None, **self.place(x))
        self.lora.adapt_backward(ops, a, d, d_dropped, dw, d_y, again, w, None)
        ops.dropout(d_x, d_dropped, a.batch.samples, residual, **self.place(x))

    def place(self, x: Ref) -> dict[str, Any]:
        """Numbers of the op: where x begins in the batch is the first token's place."""
        return {**self.numbers, "first": x.rows_before, "length": x.entire.shape[-2]}
