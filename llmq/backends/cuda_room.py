"""Values of weights that become what the GPU holds on the GPU itself, in slices of rows that pass through its arena.

No program runs then, so the arena is free, and the plan has made it large enough for frozen weights of few bits
(`room_bytes` in llmq/model/held.py). Others are converted and repeated there as far as it happens to have room.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llmq.model.held import Repeated, Values, Work, slice_rows
from llmq.operands import Output, Tensor
from llmq.ops import cuda
from llmq.plan.arena import aligned
from llmq.tensor import DTYPES

WRITTEN = {DTYPES[name]: name for name in ("bf16", "fp32")}  # what is copied unchanged, repeated, and converted
EVEN = 8  # numbers that kernels take at a time


class DeviceRoom:
    """Ops of the GPU on the current stream, and `num_bytes` of its arena from `start` on, given out in order.

    `view(home, offset, shape, dtype)` is the array at an offset.
    """

    ops: Mapping[str, Callable[..., None]] = cuda.OPS

    def __init__(self, view: Callable[..., Any], start: int, num_bytes: int, stream: Any) -> None:
        self._view, self._next, self._end, self._stream = view, start, start + num_bytes, stream
        self._slices: dict[int, int] = {}  # where slices lie, by their bytes
        self._block: tuple[np.ndarray, Any] | None = None

    def rows_at_once(self, width: int) -> int:
        """Rows of a slice."""
        return slice_rows(width)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """The next bytes of the arena."""
        return self._view("device", self._taken(math.prod(shape) * DTYPES[dtype].itemsize), shape, DTYPES[dtype])

    def _taken(self, num_bytes: int) -> int:
        """Where the next bytes of the arena are."""
        place = self._next
        self._next += aligned(num_bytes)
        assert self._next <= self._end, f"{num_bytes} bytes are more than the plan has left for loading"
        return place

    def by_rows(self, values: Values, dtype: str, work: Work) -> None:
        """The slices in order, each copied over or made when the one before it is done."""
        rows, width = values.shape
        at_once = min(rows, slice_rows(width))
        num_bytes = 4 * at_once * width
        if num_bytes not in self._slices:
            self._slices[num_bytes] = self._taken(num_bytes)
        for start in range(0, rows, at_once):
            part = values[start : start + at_once]
            x = self._filled(self._slices[num_bytes], part, dtype)
            work(start, Tensor("value", x, x.shape))
            self._stream.synchronize()  # the host's numbers are no longer read

    def set(self, array: Any, values: Values) -> bool:
        """array (..., K) <- values of another dtype, or that repeat themselves, rounded to nearest even; whether there
        was room, and a kernel, for that."""
        kind, room = array.dtype, self._end - self._next
        if np.shape(values) != array.shape or kind not in WRITTEN:
            return False
        width = array.shape[-1]
        if width % EVEN:
            return False
        if isinstance(values, Repeated):
            if aligned(values.block.nbytes) > room:
                return False
            self._repeat(array, values)
            return True
        if values.dtype not in WRITTEN or values.dtype == kind or 4 * slice_rows(width) * width + 256 > room:
            return False
        out = Output("value", array.shape, WRITTEN[kind], (Tensor("value", array, array.shape),))
        rows = values.reshape(-1, width)
        self.by_rows(rows, WRITTEN[kind], lambda start, x: self.ops["cast"](out.chunk(start, x.shape[0]), x))
        return True

    def _repeat(self, array: Any, values: Repeated) -> None:
        """array <- values, rounded to its dtype."""
        import cupy

        drawn = min(values.stop, len(values))
        if drawn < len(values):
            cupy.cuda.runtime.memsetAsync(array.data.ptr, 0, array.nbytes, self._stream.ptr)
        rows = array[:drawn]
        out = Output("value", rows.shape, WRITTEN[array.dtype], (Tensor("value", rows, rows.shape),))
        if self._block is None or self._block[0] is not values.block:
            self._block = (values.block, self.empty(values.block.shape, WRITTEN[values.block.dtype]))
            self._copy(self._block[1], values.block)
        block = self._block[1]
        self.ops["repeat"](out, Tensor("block", block, block.shape), first=values.first)

    def _filled(self, place: int, values: Values, dtype: str) -> Any:
        """The values of a slice where ops read them."""
        if isinstance(values, Repeated):
            array = self._view("device", place, values.shape, DTYPES[dtype])
            self._repeat(array, values)
            return array
        values = values if values.dtype in WRITTEN else values.astype(DTYPES[dtype])
        array = self._view("device", place, values.shape, values.dtype)
        self._copy(array, values)
        return array

    def _copy(self, array: Any, values: np.ndarray) -> None:
        """array <- values of its dtype."""
        import cupy

        runtime, host = cupy.cuda.runtime, np.ascontiguousarray(values)
        runtime.memcpyAsync(array.data.ptr, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, self._stream.ptr)
        self._stream.synchronize()
