"""A linear map and what an adapter adds to its output: y = W x + b + adapter(x).

The adapter's product is written first where it fills y, and the map's own product adds to it: that takes longer to
compute than y to read, while a product of so few terms is as fast as memory. So it is with the gradient of x.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from llmq.protocols import Ops, Parameters, Slots
from llmq.row import Row
from llmq.sites.linear import Linear
from llmq.tensor import Ref, Slot


class Adapter(Protocol):
    """What is trained beside a linear map. `fills`: it adds to all of y; `covers`: to all of the gradient of x."""

    @property
    def fills(self) -> bool: ...

    @property
    def covers(self) -> bool: ...

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """Slots of its own, for an input `x`."""

    def rows(self, layer: int | None) -> Iterator[Row]:
        """Its parameter rows."""

    def forward(self, ops: Ops, a: Slots, y: Ref, x: Ref, w: Parameters, residual: Ref | None) -> None:
        """What it adds to of y (...,N) <- x (...,K), residual (...,N) or None."""

    def backward(
        self, ops: Ops, a: Slots, d: Slots, d_x: Ref, dw: Parameters, d_y: Ref, x: Ref, w: Parameters, plus: Ref | None
    ) -> None:
        """d_x (...,K) as far as it covers it, dw <- d_y (...,N), x (...,K), plus (...,K) or None."""


class AdaptedLinear:
    """The site `base` with an `adapter`."""

    def __init__(self, base: Linear, adapter: Adapter) -> None:
        self.base, self.adapter, self.name, self.key = base, adapter, base.name, base.key
        # An adapter of some columns alone cannot come first: nothing would have written the others.
        self.order = (adapter, base) if adapter.fills else (base, adapter)
        self.back_order = (adapter, base) if adapter.covers else (base, adapter)

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """The adapter's beside those of the base."""
        return (*self.base.slots(x), *self.adapter.slots(x))

    def rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """The base's rows, and the adapter's."""
        own = self.base.rows(rows)
        # The adapter has the layer of what it adapts: it is fetched, gathered and updated with that part.
        layer = own[0].layer if own else None  # a tied head has no rows
        return (*own, *self.adapter.rows(layer))

    def forward(self, ops: Ops, a: Slots, y: Ref, x: Ref, w: Parameters, residual: Ref | None = None) -> None:
        """y (...,N) <- x (...,K), w, residual (...,N) or None."""
        first, second = self.order
        first.forward(ops, a, y, x, w, residual)
        second.forward(ops, a, y, x, w, y)

    def backward(self, ops: Ops, a: Slots, d: Slots, d_x: Ref, dw: Parameters, d_y: Ref, x: Ref, w: Parameters) -> None:
        """d_x, dw <- d_y, x, w."""
        first, second = self.back_order
        first.backward(ops, a, d, d_x, dw, d_y, x, w, None)
        second.backward(ops, a, d, d_x, dw, d_y, x, w, d_x)
