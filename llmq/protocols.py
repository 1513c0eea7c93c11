"""What block code is written against: ops by name, tensors by attribute, linear maps, sublayers and stores.

Nothing is decided here. An editor follows `a.` and `w.` by these; a backend, a site or a store fits when it has
the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from llmq.row import Row, SublayerRows
from llmq.tensor import Ref, Slot

PartName = str | int  # of a model: `embed`, a layer by its number, `head`


class Ops:
    """Every op by its name; the planner's recorder and a backend make the methods when they are asked for.

    An op takes what its function in `llmq/ops/reference/` takes, with Refs in place of tensors and None for a result
    that is not wanted. mypy checks calls by that function's signature (`tools/ops_for_mypy.py`).
    """

    def __getattr__(self, op: str) -> Callable[..., None]:
        raise AttributeError(op)


class Slots(Protocol):
    """The slots of a sublayer by attribute: `a.x`; `a.batch`, `a.const` and `a.total` are bundles that all share."""

    def __getattr__(self, name: str) -> Any: ...

    def __getitem__(self, name: Any) -> Any: ...

    def renamed(self, names: Mapping[str, str]) -> Slots:
        """The same in which slots have these names, each given with the one that it has here."""

    def chunk(self, names: Iterable[str], start: int, count: int) -> Slots:
        """The same with rows [start, start + count) in place of the slots `names`."""


class Parameters(Protocol):
    """The rows of a part, a sublayer or a site by attribute: `w.up.weight`. What a model lacks is None."""

    def __getattr__(self, name: str) -> Any: ...


class Site(Protocol):
    """A linear map. Its `key` is the last part of its name, `up` of `layers.3.mlp.up`."""

    name: str
    key: str

    def slots(self, x: Slot) -> tuple[Slot, ...]:
        """Slots of its own, for an input `x`."""

    def rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Its parameter rows, of which the model has `rows`."""

    def forward(self, ops: Ops, a: Slots, y: Ref, x: Ref, w: Parameters, residual: Ref | None = None) -> None:
        """y <- x, w, residual."""

    def backward(self, ops: Ops, a: Slots, d: Slots, d_x: Ref, dw: Parameters, d_y: Ref, x: Ref, w: Parameters) -> None:
        """d_x, dw <- d_y, x, w."""


class Into(Protocol):
    """From the residual stream into a sublayer, with its first linear map."""

    def rows(self, at: SublayerRows, size: int, file: str) -> Iterator[Row]:
        """Its parameters, of `size` channels, which are `file`."""

    def slots(self, b: int, t: int, c: int) -> tuple[Slot, ...]:
        """What the map reads of a batch of b sequences of t tokens of c channels, then intermediates."""

    def forward(self, ops: Ops, a: Slots, w: Parameters, site: Site, y: Ref) -> None:
        """y <- a.res."""

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters, site: Site, d_y: Ref) -> None:
        """d.res, dw <- d_y, d.out."""


class Onto(Protocol):
    """From a sublayer onto the residual stream, with its last linear map."""

    def rows(self, at: SublayerRows, size: int, file: str) -> Iterator[Row]:
        """Its parameters, of `size` channels, which are `file`."""

    def slots(self, b: int, t: int, c: int) -> tuple[Slot, ...]:
        """Intermediates for a batch of b sequences of t tokens of c channels."""

    def forward(self, ops: Ops, a: Slots, w: Parameters, site: Site, x: Ref) -> None:
        """a.out <- x, a.res."""

    def backward(
        self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters, site: Site, d_x: Ref, x: Ref
    ) -> None:
        """d_x, dw <- d.out, x."""


class Activation(Protocol):
    """What lies between the two linear maps of an MLP. The first one is `maps` of F outputs: gate and up, or up."""

    maps: int

    def forward(self, ops: Ops, act: Ref, gate_up: Ref) -> None:
        """act (...,F) <- gate_up (...,2F), or (...,F) of one map."""

    def backward(self, ops: Ops, d_gate_up: Ref, d_act: Ref, gate_up: Ref) -> None:
        """d_gate_up <- d_act, gate_up."""


class Core(Protocol):
    """Attention itself, between the rotary embedding and the output projection."""

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Results for a batch of b sequences of t tokens, `att` first."""

    def forward(self, ops: Ops, a: Slots) -> None:
        """a.att <- a.rot."""

    def backward(self, ops: Ops, a: Slots, d: Slots) -> None:
        """d.rot <- d.att; in training."""


class Sublayer(Protocol):
    """Half a layer: it reads the residual stream and adds to it."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """Its linear maps, in the order of the forward pass."""

    def slots(self, b: int, t: int) -> tuple[Slot, ...]:
        """Intermediates for a batch of b sequences of t tokens."""

    def forward(self, ops: Ops, a: Slots, w: Parameters) -> None:
        """a.out <- a.res."""

    def backward(self, ops: Ops, a: Slots, d: Slots, w: Parameters, dw: Parameters) -> None:
        """d.res, dw <- d.out."""


class PiecedSublayer(Sublayer, Protocol):
    """One that may work on a piece of the tokens at a time."""

    def pieces(self, a: Slots) -> list[Slots]:
        """Frames of what is made again and goes back at a time."""


class WeightStore(Protocol):
    """Holds the weights."""

    def walk(self, ops: Ops, parts: Iterable[PartName], phase: str) -> Iterator[tuple[PartName, Parameters]]:
        """Yields each part with its rows, in the order given, ready to be read until the next one is asked for."""

    def written(self, ops: Ops, only: Container[str] | None = None) -> Iterator[Ref | None]:
        """Yields what the copies of each trained row are written to."""

    def frozen(self) -> list[Ref]:
        """The rows that are not trained, whose copies are made once."""


class GradStore(Protocol):
    """Holds the gradients."""

    def walk(self, ops: Ops, parts: Iterable[PartName]) -> Iterator[Parameters]:
        """Yields what each part adds its gradients to; it is complete when the next one is asked for."""

    def sums(self, ops: Ops) -> Iterator[Ref]:
        """Yields the gradient of each trained row, as the optimizer reads it."""

    def shares(self, ops: Ops) -> Iterator[Ref]:
        """Yields what this rank adds to the norm of the whole gradient."""
