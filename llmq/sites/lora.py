"""A low-rank adapter of a linear map: s B A x (LoRA; Hu et al., 2021).

A fused site, such as q, k and v, has an adapter for each of its parts. Their A are one row `lora_a` (sum of ranks, K),
which reads x once; each B is a row `lora_b.q_proj` of its own and adds to its columns of y. All operands are read as
they are, whatever forms the site itself reads.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from llmq.protocols import Ops, Parameters, Slots
from llmq.row import HeadOrder, Part, Row
from llmq.tensor import Ref, Slot

Some = TypeVar("Some", Ref, Ref | None)
FROM_ZERO = ("kaiming", "gaussian")  # inits with which B is zero
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
    order: HeadOrder | None = None  # of outputs in files

    @property
    def columns(self) -> tuple[int, int]:
        """First column of y, and how many."""
        return (self.start, self.stop - self.start)

    @property
    def low(self) -> tuple[int, int]:
        """First column of A x, and how many."""
        return (self.first, self.rank)


def cut(ref: Some, columns: tuple[int, int]) -> Some:
    """Columns (start, count) of a tensor; itself if these are all, or if there is none."""
    return ref if ref is None or columns[1] == ref.shape[-1] else ref.columns(*columns)


def one_pass(ops: Ops, d_low: Ref, d_up: Ref, d_y: Ref, low: Ref, up: Ref, *, alpha: float) -> None:
    """d_low (...,R), d_up (N,R) <- d_y (...,N), low (...,R), up (N,R), by the op that reads d_y once."""
    ops.low_rank_backward(d_low, d_up, d_y, low, up, alpha=alpha)


def two_products(ops: Ops, d_low: Ref, d_up: Ref, d_y: Ref, low: Ref, up: Ref, *, alpha: float) -> None:
    """d_low (...,R), d_up (N,R) <- d_y (...,N), low (...,R), up (N,R), for any rank and place."""
    ops.linear_dgrad(d_low, d_y, up, None, alpha=alpha)
    ops.linear_wgrad(d_up, d_y, low, alpha=alpha)


@dataclass(frozen=True)
class LoraAdapter:
    """Adapters `pieces` of the site `name`, which has `outputs` outputs. Their rows are kept in `file`.

    `init` says how A is drawn or made, B being zero, or of which part of the weight both are made. Values are of
    `dtype`.
    """

    name: str
    pieces: Sequence[LowRank]
    init: str
    file: str
    dtype: str
    outputs: int

    covers = True

    @property
    def key(self) -> str:
        """With which the names of its slots begin."""
        return self.name.rpartition(".")[2]

    @property
    def rank(self) -> int:
        """Of all pieces."""
        return sum(piece.rank for piece in self.pieces)

    @property
    def fills(self) -> bool:
        """Whether its pieces have all columns of y."""
        return sum(piece.stop - piece.start for piece in self.pieces) == self.outputs

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """A x (...,R) of all pieces."""
        return (Slot(f"{self.key}.low", (*x.shape[:-1], self.rank), x.roles),)

    def rows(self, layer: int | None) -> Iterator[Row]:
        """A of all pieces, and the B of each."""
        # PiSSA and OLoRA take A and B out of the weight; with all others the run begins at the base's own outputs.
        init_b = "zeros" if self.init in FROM_ZERO else self.init
        # One row for the A of all parts: they read the same x, and one product of their ranks together reads it once.
        down = [Part(f"{p.name}.lora_A.weight", p.first, p.first + p.rank) for p in self.pieces]
        shape = (self.rank, self.pieces[0].inputs)
        yield Row(f"{self.name}.lora_a", shape, tuple(down), self.init, True, layer, file=self.file)
        for piece in self.pieces:
            up = Part(f"{piece.name}.lora_B.weight", 0, piece.outputs, piece.order)
            name, shape = f"{self.name}.lora_b.{piece.key}", (piece.stop - piece.start, piece.rank)
            yield Row(name, shape, (up,), init_b, True, layer, file=self.file)

    def forward(self, ops: Ops, a: Slots, y: Ref, x: Ref, w: Parameters, residual: Ref | None) -> None:
        """The pieces' columns of y (...,N) <- s B A x + those of residual (...,N) or None."""
        # A row for each B: these write other columns of y, and PEFT has them as tensors of their own.
        low = self.down(ops, a, x, w)
        for piece in self.pieces:
            out, own, up = cut(y, piece.columns), cut(low, piece.low), getattr(w.lora_b, piece.key)
            ops.linear_forward(out, own, up, None, cut(residual, piece.columns), alpha=piece.scale)

    def down(self, ops: Ops, a: Slots, x: Ref, w: Parameters) -> Ref:
        """What B multiplies (...,R): a.low <- A x."""
        low: Ref = a[f"{self.key}.low"]
        ops.linear_forward(low, x, w.lora_a, None, None)
        return low

    def backward(
        self, ops: Ops, a: Slots, d: Slots, d_x: Ref, dw: Parameters, d_y: Ref, x: Ref, w: Parameters, plus: Ref | None
    ) -> None:
        """d_x (...,K), gradients of A and B <- d_y (...,N), a.low, x (...,K), plus (...,K) or None."""
        self.add_backward(ops, a, d, dw, d_y, x, w)
        # Adds to what there is in the product itself: no pass over d_x for the sum.
        ops.linear_dgrad(d_x, d[f"{self.key}.low"], w.lora_a, plus)

    def add_backward(self, ops: Ops, a: Slots, d: Slots, dw: Parameters, d_y: Ref, x: Ref, w: Parameters) -> None:
        """d.low (...,R), gradients of A and B <- d_y (...,N), a.low, x (...,K)."""
        low, d_low = a[f"{self.key}.low"], d[f"{self.key}.low"]
        # First, as A's gradient reads the d_low that it leaves.
        self.up_backward(ops, d_low, dw, d_y, low, w)
        ops.linear_wgrad(dw.lora_a, d_low, x)

    def up_backward(self, ops: Ops, d_low: Ref, dw: Parameters, d_y: Ref, low: Ref, w: Parameters) -> None:
        """d_low (...,R), gradients of B <- d_y (...,N), low, what B multiplies."""
        for piece in self.pieces:
            out, up, d_up = cut(d_y, piece.columns), getattr(w.lora_b, piece.key), getattr(dw.lora_b, piece.key)
            own, d_own = cut(low, piece.low), cut(d_low, piece.low)
            self.products(piece)(ops, d_own, d_up, out, own, up, alpha=piece.scale)

    def products(self, piece: LowRank) -> Callable[..., None]:
        """What makes the gradients of a piece's B, and of what B multiplies."""
        # The one pass reads whole 16-byte words, so every place and width has to be a multiple of 8 numbers of bf16.
        places = (piece.first, piece.start, piece.stop, self.rank, self.outputs)
        return one_pass if takes_one_pass(self.dtype, piece.rank, *places) else two_products


@dataclass(frozen=True)
class DroppedAdapter:
    """The adapter `lora` with dropout of its input: s B A drop(x).

    Which inputs are left out is a function of seed, sample, position and site, so drop(x) is made again in backward
    and not kept. All parts of a fused site read the same drop(x).
    """

    lora: LoraAdapter
    rate: float
    seed: int

    covers = True

    @property
    def fills(self) -> bool:
        """Whether its pieces have all columns of y."""
        return self.lora.fills

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """drop(x) (...,K) of forward and of backward too."""
        # Two slots, as forward's is gone when backward makes it again from the same random bits.
        own = (Slot(f"{self.lora.key}.{name}", x.shape, x.roles) for name in ("dropped", "again"))
        return (*self.lora.slots(x), *own)

    def rows(self, layer: int | None) -> Iterator[Row]:
        """A of all pieces, and the B of each."""
        return self.lora.rows(layer)

    def forward(self, ops: Ops, a: Slots, y: Ref, x: Ref, w: Parameters, residual: Ref | None) -> None:
        """The pieces' columns of y (...,N) <- s B A drop(x) + those of residual (...,N) or None, a.batch.samples."""
        dropped = a[f"{self.lora.key}.dropped"]
        ops.dropout(dropped, x, a.batch.samples, None, **self.place(x))
        self.lora.forward(ops, a, y, dropped, w, residual)

    def backward(
        self, ops: Ops, a: Slots, d: Slots, d_x: Ref, dw: Parameters, d_y: Ref, x: Ref, w: Parameters, plus: Ref | None
    ) -> None:
        """d_x (...,K), gradients of A and B <- d_y (...,N), a.low, x (...,K), plus (...,K) or None."""
        again, d_dropped = a[f"{self.lora.key}.again"], d[f"{self.lora.key}.dropped"]
        ops.dropout(again, x, a.batch.samples, None, **self.place(x))
        self.lora.backward(ops, a, d, d_dropped, dw, d_y, again, w, None)
        # The gradient passes where x did, so dropout of it by the same bits is dropout's backward.
        ops.dropout(d_x, d_dropped, a.batch.samples, plus, **self.place(x))

    def place(self, x: Ref) -> dict[str, Any]:
        """Numbers of the op: where x begins in the batch is the first token's place."""
        # By name, so that the bits of a site are the same whatever else is adapted.
        stream = zlib.crc32(f"dropout {self.lora.name}".encode())
        at = {"first": x.rows_before, "length": x.entire.shape[-2]}
        return {"rate": self.rate, "seed": self.seed, "stream": stream, **at}
