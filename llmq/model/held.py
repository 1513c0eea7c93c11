"""Frozen rows that are held in a form: which one, made of the source's values while loading, and read back.

The last two go by slices of matrix rows, so that a large row is never there in f32 as a whole, nor on a GPU in its own
dtype. What makes a copy is ops, of the backend whose memory it lies in; a `Room` gives them slices, and room for what
is between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from llmq.errors import UsageError
from llmq.few_bits import NESTED_BLOCK, NF4_BLOCK
from llmq.hardware.cores import in_threads
from llmq.operands import Output, Tensor
from llmq.ops import reference
from llmq.ops.reference.quantize import reader
from llmq.row import Row
from llmq.scaling import BLOCK, Nested
from llmq.tensor import DTYPES, LIMITS, Form, Ref, scale_shape, stored_shape


@dataclass(frozen=True)
class Repeated:
    """An array of `shape` whose flat numbers are those of `block` (n,) from number `first` on, over and over; its
    rows from `stop` on are zero. `np.asarray` makes it."""

    block: np.ndarray
    shape: tuple[int, ...]
    stop: int
    first: int = 0

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Repeated:
        """Some rows, one after the other."""
        start, stop, step = rows.indices(len(self))
        assert step == 1
        width = math.prod(self.shape[1:])
        return Repeated(
            self.block, (max(stop - start, 0), *self.shape[1:]), max(self.stop - start, 0), self.first + start * width
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = np.resize(np.roll(self.block, -(self.first % self.block.size)), self.shape)
        value[self.stop :] = 0
        return value if dtype is None else value.astype(dtype, copy=False)


Values = np.ndarray | Repeated
Work = Callable[[int, Tensor], None]  # of the rows from the given one on
SLICE_BYTES = 2**25  # of a slice in f32 on a GPU, if that is at least 128 rows
CELL_BYTES = 2**16  # of what is between, but for the scales of NF4
REPEATED_BYTES = 2**22  # of a block that is repeated
UNWANTED = Output("unwanted", (), "fp32", ())


class Room(Protocol):
    """Where copies are made: ops, and memory in which they meet values of the host.

    `by_rows` calls a function for slices of at most `rows_at_once` matrix rows, a multiple of 128, of values (N,K) as
    ops read them, in `dtype` if they are made there. `empty` gives an array that lasts until the next one's copy is
    made.
    """

    @property
    def ops(self) -> Mapping[str, Callable[..., None]]: ...
    def rows_at_once(self, width: int) -> int: ...
    def by_rows(self, values: Values, dtype: str, work: Work) -> None: ...
    def empty(self, shape: tuple[int, ...], dtype: str) -> Any: ...


class HostRoom:
    """The reference ops; slices are made at the same time, on all cores, and are the values themselves."""

    ops = reference.OPS

    def rows_at_once(self, width: int) -> int:
        """Rows of a slice."""
        return BLOCK

    def by_rows(self, values: Values, dtype: str, work: Work) -> None:
        """The slices in any order."""

        def of_slice(start: int) -> None:
            part = np.asarray(values[start : start + BLOCK])
            work(start, Tensor("value", part, part.shape))

        in_threads(of_slice, range(0, len(values), BLOCK))

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Memory of its own."""
        return np.empty(shape, DTYPES[dtype])


def is_layer_weight(row: Row) -> bool:
    """Whether a row is the weight of a layer's linear map, which a quantized base has in few bits."""
    return row.layer is not None and row.site is not None and len(row.shape) == 2 and row.file == "model"


def _nf4(row: Row, single: bool) -> Form:
    sizes = {part.name: (part.stop - part.start) * row.shape[1] for part in row.parts}
    if odd := [f"{name} has {size}" for name, size in sizes.items() if size % NF4_BLOCK]:
        raise UsageError(f"--base-dtype nf4 takes numbers in blocks of {NF4_BLOCK}, and {odd[0]}: use int8 or mxfp4")
    borders = [part.start * row.shape[1] // NF4_BLOCK for part in row.parts]
    return Form("nf4", "row", f"nested{math.gcd(NESTED_BLOCK, *borders)}")


# The form of a frozen weight for --base-dtype; of e4m3 with a single scale or one for each tile. UsageError.
# int8 has one scale for a row, as LLM.int8() (Dettmers et al., 2022)
HELD_FORMS: dict[str, Callable[[Row, bool], Form]] = {
    "e4m3": lambda row, single: Form("e4m3", "row", "current" if single else "tilewise"),
    "int8": lambda row, single: Form("int8", "row", "rowwise"),
    "nf4": _nf4,
    "mxfp4": lambda row, single: Form("mxfp4", "row", "exponents"),
}


def slice_rows(width: int) -> int:
    """Matrix rows, a multiple of 128, that a GPU takes at a time."""
    return max(BLOCK, SLICE_BYTES // (4 * width) // BLOCK * BLOCK)


def room_bytes(ref: Ref) -> int:
    """Bytes of a GPU that making a held copy takes beside the copy."""
    rows, width = math.prod(ref.shape[:-1]), ref.shape[-1]
    absmax = 4 * rows * width // NF4_BLOCK if ref.form is not None and ref.form.dtype == "nf4" else 0
    return 4 * min(rows, slice_rows(width)) * width + absmax + CELL_BYTES + REPEATED_BYTES


def hold(room: Room, copy: Tensor, dtype: str, values: Values, borders: Sequence[int] = ()) -> None:
    """The numbers and the scales of a held copy (N,K) <- values (N,K), of any float dtype, rounded to `dtype`.

    It is made of the tensors whose rows end at `borders`; none: of one.
    """
    form, ops, width = copy.form, room.ops, copy.shape[-1]
    assert form is not None and copy.scale is not None
    if isinstance(form.scales, Nested):
        absmax = room.empty((copy.array.size * 2 // NF4_BLOCK,), "fp32")
        plain = Form(form.dtype, "row", "absmax")

        def encode(start: int, x: Tensor) -> None:
            first, stop = (row * width // NF4_BLOCK for row in (start, start + x.shape[0]))
            numbers = copy.array[start : start + x.shape[0]]
            part = Tensor(copy.name, numbers, x.shape, plain, absmax[first:stop])
            ops["quantize"](Output(copy.name, x.shape, dtype, (part,)), UNWANTED, x, limit=LIMITS[form.dtype])

        room.by_rows(values, dtype, encode)
        ends = tuple(stop * width // NF4_BLOCK for stop in borders or copy.shape[:1])
        scales = Output(copy.name, copy.scale.shape, "uint8", (Tensor(copy.name, copy.scale, copy.scale.shape),))
        ops["nest"](scales, Tensor(copy.name, absmax, absmax.shape), group=form.scales.group, borders=ends)
        return
    whole = Output(copy.name, copy.shape, dtype, (copy,))
    if not form.is_measured:
        room.by_rows(
            values,
            dtype,
            lambda start, x: ops["quantize"](whole.chunk(start, x.shape[0]), UNWANTED, x, limit=LIMITS[form.dtype]),
        )
        return
    at_once = room.rows_at_once(width)
    largest = room.empty((-(-copy.shape[0] // at_once),), "fp32")

    def measure(start: int, x: Tensor) -> None:
        index = start // at_once
        ops["amax"](_plain(largest[index : index + 1]), x, in_bf16=dtype == "bf16")

    room.by_rows(values, dtype, measure)
    ops["amax_scale"](_plain(copy.scale), Tensor(copy.name, largest, largest.shape), limit=LIMITS[form.dtype])
    room.by_rows(values, dtype, lambda start, x: ops["cast"](whole.chunk(start, x.shape[0]), x))


def single_scale(room: Room, scale: Any, copy: Tensor, dtype: str, fp8: str) -> None:
    """scale (1,) f32 <- that of an `fp8` copy of the value of a held copy in `dtype`, by `amax_scale`."""
    largest = room.empty((1,), "fp32")
    room.ops["amax"](_plain(largest), copy, in_bf16=dtype == "bf16")
    room.ops["amax_scale"](_plain(scale), Tensor(copy.name, largest, (1,)), limit=LIMITS[fp8])


def _plain(array: Any) -> Output:
    """An array in f32 as an output."""
    return Output("scale", array.shape, "fp32", (Tensor("scale", array, array.shape),))


def held_copy(ref: Ref, value: np.ndarray, borders: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
    """The bytes and the scales of `value` (N,K) in the form of `ref`; `borders` as for `hold`."""
    assert ref.form is not None
    numbers = np.empty(stored_shape(ref.shape, ref.form), DTYPES[ref.form.dtype])
    scale = np.empty(scale_shape(ref.shape, ref.form), DTYPES[ref.form.scales.dtype])
    hold(HostRoom(), Tensor(ref.name, numbers, ref.shape, ref.form, scale), ref.dtype, value, borders)
    return numbers, scale


def held_value(copy: Tensor, dtype: str) -> np.ndarray:
    """The value of a held copy, in `dtype`."""
    value, read = np.empty(copy.shape, DTYPES[dtype]), reader(copy)

    def of_slice(start: int) -> None:
        value[start : start + BLOCK] = read(start)

    in_threads(of_slice, range(0, len(value), BLOCK))
    return value


@dataclass(frozen=True)
class HeldBase:
    """How a run holds the frozen model: all of it in `dtype`, and the weights of the layers' linear maps in few bits if
    the --base-dtype `base` has few. Of e4m3 the rows named in `single` have one scale for the whole."""

    base: str | None = None
    dtype: str = "fp32"
    single: frozenset[str] = frozenset()

    @property
    def is_quantized(self) -> bool:
        """Whether weights are held in few bits."""
        return self.base in HELD_FORMS

    def __str__(self) -> str:
        if not self.is_quantized:
            return self.dtype
        scales = " with one scale for each matrix" if self.single else ""
        return f"{self.base}{scales}, made of {self.dtype}"

    def value(self, row: Row, value: np.ndarray) -> np.ndarray:
        """What the run reads of a row of the model, of any float dtype; in fp32 that is the value."""
        if self.base is None or not self.is_quantized or not is_layer_weight(row):
            return value if self.dtype == "fp32" else value.astype(DTYPES[self.dtype], copy=False)
        form = HELD_FORMS[self.base](row, row.name in self.single)
        ref = Ref(row.name, "weight", row.shape, self.dtype, row.layer, form=form)
        numbers, scale = held_copy(ref, value, [part.stop for part in row.parts])
        return held_value(Tensor(row.name, numbers, row.shape, form, scale), self.dtype)


AS_IT_IS = HeldBase()
