"""Between the residual stream and a sublayer's linear maps: what the first one reads, and how the last one's output is
added. Both are objects, as families differ in them."""

from collections.abc import Iterator
from typing import Any

from llmq.protocols import Ops, Parameters, Site, Slots
from llmq.row import Row, SublayerRows
from llmq.tensor import Ref, Slot


class RmsNorm:
    """x = rmsnorm(res) (Zhang and Sennrich, 2019), of which the weight is w + `offset`."""

    def __init__(self, eps: float, offset: float = 0.0) -> None:
        self.of_weight: dict[str, Any] = {"offset": offset} if offset else {}
        self.numbers: dict[str, Any] = {"eps": eps, **self.of_weight}

    def rows(self, at: SublayerRows, size: int, file: str) -> Iterator[Row]:
        """Its weight (C,)."""
        yield at.vector("norm", size, file)

    def stats(self, b: int, t: int, roles: tuple[str, ...]) -> tuple[Slot, ...]:
        """What backward needs of b sequences of t tokens: rstd (B,T)."""
        return (Slot("rstd", (b, t), roles, "stat"),)

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.x <- a.res."""
        ops.rmsnorm_forward(a.x, a.rstd, a.res, w.norm, **self.numbers)

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters, through: Ref | None) -> None:
        """d.res, dw <- d.x, and the gradient `through` the stream."""
        ops.rmsnorm_backward(d.res, dw.norm, d.x, through, a.res, w.norm, a.rstd, **self.of_weight)


class Normed:
    """The first map reads x, a `norm` of the stream."""

    def __init__(self, norm: RmsNorm) -> None:
        self.norm, self.rows = norm, norm.rows

    def slots(self, b: int, t: int, c: int) -> tuple[Slot, ...]:
        """x (B,T,C), which the map reads, and what the norm keeps."""
        return Slot("x", (b, t, c), ("norm",)), *self.norm.stats(b, t, ("block",))

    def forward(self, ops: Ops, a: Slots, w: Parameters, site: Site, y: Ref) -> None:
        """y <- a.res."""
        self.norm.forward(ops, a, w)
        site.forward(ops, a, y, a.x, getattr(w, site.key))

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters, site: Site, d_y: Ref) -> None:
        """d.res, dw <- d_y, d.out."""
        site.backward(ops, a, d, d.x, getattr(dw, site.key), d_y, a.x, getattr(w, site.key))
        self.norm.backward(ops, a, d, w, dw, d.out)


class Added:
    """out = res + the last map's output."""

    def rows(self, at: SublayerRows, size: int, file: str) -> Iterator[Row]:
        """No parameters."""
        yield from ()

    def slots(self, b: int, t: int, c: int) -> tuple[Slot, ...]:
        """No intermediates."""
        return ()

    def forward(self, ops: Ops, a: Slots, w: Parameters, site: Site, x: Ref) -> None:
        """a.out <- x, a.res."""
        site.forward(ops, a, a.out, x, getattr(w, site.key), residual=a.res)

    def backward(
        self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters, site: Site, d_x: Ref, x: Ref
    ) -> None:
        """d_x, dw <- d.out, x."""
        site.backward(ops, a, d, d_x, getattr(dw, site.key), d.out, x, getattr(w, site.key))
