"""Handles without memory: how a tensor is stored (Form), an intermediate of a sublayer (Slot), what is passed (Ref).

Block code and the planner handle Refs, which are names with shapes. Once the plan is laid out, every argument of every
call becomes one of the operands in llmq/operands.py. One value may be stored in several forms at once (bf16 value,
quantized row-major, quantized transposed, column sums). A consumer names the form it reads, and an op writes all forms
that are read, each a function of the value *as rounded to the slot's dtype*: so a copy made now and one made again
later have the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from llmq.few_bits import LEVELS
from llmq.scaling import HELD, SCALINGS, Scaling

Instance = TypeVar("Instance")
DTYPES: dict[str, np.dtype] = {
    "fp64": np.dtype(np.float64),
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int32": np.dtype(np.int32),
    "int8": np.dtype(np.int8),
    **dict.fromkeys(LEVELS, np.dtype(np.uint8)),  # two numbers in each byte
    "uint8": np.dtype(np.uint8),
}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}  # finite limits of the fp8 formats (OCP 8-bit floating point, 2023)
LIMITS = {**LARGEST, "int8": 127.0, "nf4": 1.0, "mxfp4": 6.0}  # of all that are made of a value and its scales
IGNORED = -100  # target of a token that is not trained
COLSUM_ROWS = 256  # a partial column sum covers this many consecutive rows
NORM_ROWS = 128  # rows of a matrix under one partial sum of squares of the gradient's norm


@dataclass(frozen=True)
class Form:
    """A representation of a slot. `layout`: row (as is), col (2-D transpose: last axis first), colsum (partial sums).

    `scaling` names how a quantized copy is scaled (in `SCALINGS` or `HELD` of llmq/scaling.py); None is a plain cast.
    """

    dtype: str
    layout: str = "row"
    scaling: str | None = None

    @cached_property
    def key(self) -> str:
        """Short unique name, as used in storage names: `e4m3/col/delayed`."""
        return "/".join(filter(None, (self.dtype, self.layout, self.scaling)))

    @cached_property
    def scales(self) -> Scaling:
        """How the copy is scaled; asked of a scaled one only."""
        assert self.scaling is not None
        return SCALINGS.get(self.scaling) or HELD[self.scaling]

    @cached_property
    def owns_scales(self) -> bool:
        """Whether the scales are made with the copy, and live and die with it."""
        return self.scaling is not None and self.scales.owns_scales

    @property
    def turns(self) -> bool:
        """Whether a transposed copy has the same scales, transposed."""
        return self.scaling is not None and self.scales.turns

    @property
    def is_sharded(self) -> bool:
        """Whether the copies of whole 128-row tiles, laid end to end, are the copy of the whole."""
        return self.layout == "row" and (self.scaling is None or self.scales.is_cell or self.scales.is_tiled)

    @cached_property
    def has_cell(self) -> bool:
        """Whether the scale is a persistent cell, which earlier steps have set."""
        return self.scaling is not None and self.scales.is_cell

    @cached_property
    def is_measured(self) -> bool:
        """Whether the scale is measured over the whole value before the copy is made."""
        return self.scaling is not None and self.scales.is_measured


COLSUM = Form("fp32", "colsum")


@dataclass(frozen=True)
class Slot:
    """A named intermediate of a sublayer: `dtype` is "act" (the model dtype), "stat" (fp32) or "int32".

    A slot is dropped after forward, and computed again in backward, when one of its `roles` is recomputed. Slots whose
    names differ only after a `#` are pieces of one value: their quantized copies share one persistent scale. One
    `of_weights` follows from weights alone: it has no axis of tokens, and is not cut where these are.
    """

    name: str
    shape: tuple[int, ...]
    roles: tuple[str, ...] = ()
    dtype: str = "act"
    of_weights: bool = False


@dataclass(frozen=True)
class View:
    """Which elements of a tensor of shape `whole` a piece is: `size` of them from element `start` on.

    They lie together, or, where there is a `pitch`, are columns of the tensor seen as a matrix: `pitch` is then the
    matrix's width, and the last of the elements is the piece's last.
    """

    whole: tuple[int, ...]
    start: int
    size: int
    pitch: int = 0


@dataclass(frozen=True)
class Origin:
    """What the value of a tensor is in, or is made of, beside its own bytes.

    `value_in` is the space whose tensor of the same name has it as well (a weight that is its own master). `held` is a
    frozen tensor, in the form that it is stored in, from which it is made. `cell` names the scale cell of its copies
    where that is another tensor's (a weight that was fetched). `is_remade`: a weight's copies for one use.
    """

    value_in: str | None = None
    held: Ref | None = None
    cell: str | None = None
    is_remade: bool = False


OWN, IN_MASTER = Origin(), Origin(value_in="master")


@dataclass(frozen=True)
class Ref:
    """A name for a tensor, in one form, without memory: what block code passes to ops.

    `space` says which store owns it: activation, weight, master, grad, m, v, sum, cell, batch, const or scale. `home`
    is where its bytes live: device or host. With a `view`, for work done in chunks, it is a piece of the tensor, and
    `shape` the piece's.

    `again` marks the second life of an intermediate, after it was dropped and made again in backward, or fetched from
    the host; and that of a gradient, as the sum over ranks. `is_sum`: calls of a program add to it.

    `origin` says what else its value is in, or is made of.
    """

    name: str
    space: str
    shape: tuple[int, ...]
    dtype: str
    layer: int | None = None
    roles: tuple[str, ...] = ()
    form: Form | None = None
    view: View | None = None
    again: bool = False
    home: str = "device"
    origin: Origin = OWN
    is_sum: bool = False

    def as_form(self, form: Form) -> Ref:
        """This tensor as stored in `form`; a plain row form of the slot's own dtype is the value itself.

        Of a frozen tensor no scale is taken from earlier steps: one scale for the whole is that of the value.
        """
        if form.layout == "colsum" and self.dtype == "fp64":
            form = replace(form, dtype="fp64")
        if self.origin.held is not None:
            form = replace(form, scaling="current") if form.has_cell else form
            if form == self.origin.held.form:
                assert self.view is None, f"{self.name}: a piece of what is held in {form}"
                return self.origin.held
        own = form.layout == "row" and form.scaling is None and form.dtype == self.dtype
        return changed(self, form=None if own else form)

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the tensor that this is, or is a piece of."""
        return self.shape if self.view is None else self.view.whole

    @property
    def start(self) -> int:
        """Elements of the tensor before the first of this piece."""
        return 0 if self.view is None else self.view.start

    @property
    def width(self) -> int:
        """Elements from the start of a row to that of the next, seen as (rows, last axis)."""
        return (self.view and self.view.pitch) or self.shape[-1]

    @property
    def entire(self) -> Ref:
        """The tensor of which this is a piece."""
        return self if self.view is None else changed(self, shape=self.whole, view=None)

    def chunk(self, start: int, count: int) -> Ref:
        """Rows [start, start + count) of this tensor, or of rows of another one, seen as (rows, last axis)."""
        width = self.shape[-1]
        assert self.view is None or not self.view.pitch, f"{self.name}: rows of columns"
        view = View(self.whole, self.start + start * width, count * width)
        return changed(self, view=view, shape=(count, width))

    def columns(self, start: int, count: int) -> Ref:
        """Columns [start, start + count) of this tensor, or of a chunk of its rows, seen as (rows, last axis)."""
        rows, width = math.prod(self.shape[:-1]), self.shape[-1]
        is_cut = self.view is not None and self.view.pitch
        assert not is_cut and 0 <= start < start + count <= width, f"{self.name}: columns {start}, {count} of them"
        view = View(self.whole, self.start + start, (rows - 1) * width + count, width)
        return changed(self, view=view, shape=(rows, count))

    @property
    def rows_before(self) -> int:
        """Rows of the value, seen as (rows, last axis), that lie before this piece; 0 of the whole."""
        return 0 if self.view is None else self.window[0].start

    @property
    def window(self) -> tuple[slice, slice]:
        """The rows and the columns of the tensor that this covers, seen as (rows, last axis)."""
        rows = math.prod(self.shape[:-1])
        row, column = divmod(self.start, self.width)
        return slice(row, row + rows), slice(column, column + self.shape[-1])

    def flat(self, start: int, count: int) -> Ref:
        """Elements [start, start + count) of this tensor seen as one axis."""
        return changed(self, view=View(self.shape, start, count), shape=(count,))

    def batch(self, start: int, count: int) -> Ref:
        """Entries [start, start + count) along the first axis."""
        size = math.prod(self.shape[1:])
        return changed(self, view=View(self.shape, start * size, count * size), shape=(count, *self.shape[1:]))


def changed(one: Instance, **fields: Any) -> Instance:
    """`dataclasses.replace` in a fraction of its time, as plans make a million copies: of a class that has no
    __post_init__ and no slots. Values that the instance has cached are left behind."""
    kind: Any = type(one)
    copy: Instance = object.__new__(kind)
    values = vars(copy)
    values.update(vars(one), **fields)
    for name in _cached(kind):
        values.pop(name, None)
    return copy


@cache
def _cached(kind: Any) -> tuple[str, ...]:
    """Names of the cached properties of a class."""
    return tuple(
        name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, cached_property)
    )


def num_norm_tiles(shape: tuple[int, ...]) -> int:
    """Partial sums of squares of a tensor seen as (rows, last axis): one for every NORM_ROWS rows, one of a vector."""
    return -(-math.prod(shape[:-1]) // NORM_ROWS)


def stored_shape(shape: tuple[int, ...], form: Form | None) -> tuple[int, ...]:
    """Shape of the bytes of a tensor of logical `shape` in `form`; two numbers of 4 bits are one byte."""
    if form is None:
        return shape
    *leading, columns = _axes(shape, form)
    return (*leading, columns // 2 if form.dtype in LEVELS else columns)


def _axes(shape: tuple[int, ...], form: Form) -> tuple[int, ...]:
    """Extents of a tensor of logical `shape` as `form` lays it out."""
    if form.layout == "row":
        return shape
    rows, columns = math.prod(shape[:-1]), shape[-1]
    return (columns, rows) if form.layout == "col" else (-(-rows // COLSUM_ROWS), columns)


def stored_dtype(ref: Ref) -> np.dtype:
    """Dtype of the bytes of a Ref."""
    return DTYPES[ref.form.dtype if ref.form else ref.dtype]


def stored_bytes(ref: Ref) -> int:
    """Bytes of what a Ref names, in its form: of the piece where it is one."""
    return math.prod(stored_shape(ref.shape, ref.form)) * stored_dtype(ref).itemsize


def scale_shape(shape: tuple[int, ...], form: Form) -> tuple[int, ...]:
    """Shape of the scales of a tensor of logical `shape` in `form`, laid out as cuBLASLt reads them."""
    *leading, columns = _axes(shape, form)
    return form.scales.shape(math.prod(leading), columns)
