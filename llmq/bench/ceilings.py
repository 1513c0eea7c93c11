"""What this device reaches at best, measured in a second or two: one large matrix product per dtype, one large copy.

A card's papers state peaks that no program sees: under load its power limit lowers the clock, and a copy pays for
turning the memory's bus around. Products are ours (cuBLASLt, timed choice of algorithms) and run back to back for
HEAT_S, on random data, which draws the power that training draws; the median of the second half counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from llmq.hardware import device as devices
from llmq.tensor import Form

SIZE = 8192  # of the product's matrices
HEAT_S = 0.4  # of products back to back
COPY_BYTES = 2**30  # read and written by the copy, or an eighth of the free memory if that is less
HOST_COPY_BYTES = 2**26


@dataclass(frozen=True)
class Ceilings:
    """FLOP/s of matrix products by the dtype of their operands, and bytes/s of a copy, read and written."""

    flops: Mapping[str, float]
    bytes_per_s: float


def measure_ceilings(kind: str, dtypes: Iterable[str]) -> Ceilings:
    """Those of the `cuda` device that is current, for products of `dtypes`, or of the `cpu`."""
    wanted = sorted(set(dtypes))
    if kind == "cpu":
        rate = devices.measured_peak("fp32")  # whatever the storage
        return Ceilings(dict.fromkeys(wanted, rate), _host_copy())
    return Ceilings({dtype: _alone(partial(_product, dtype)) for dtype in wanted}, _alone(_copy))


def _alone(measure: Callable[[], float]) -> float:
    """What `measure` returns; the GPU memory that it took is given back."""
    import cupy

    rate = measure()
    cupy.get_default_memory_pool().free_all_blocks()
    return rate


def _host_copy() -> float:
    """Bytes/s of the best of several copies on the host."""
    source, target = np.ones((2, HOST_COPY_BYTES // 2), np.uint8)
    best = math.inf
    for _ in range(8):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return HOST_COPY_BYTES / best


def _product(dtype: str) -> float:
    """FLOP/s of our matrix product, both operands of `dtype` with the summed axis innermost."""
    from llmq.bench.ops import Arrays, Invocation
    from llmq.ops.cuda.algorithms import Algorithms
    from llmq.ops.cuda.cublaslt import Gemms, device_key
    from llmq.ops.cuda.linear import linear_kernels

    arrays, shape = Arrays(), (SIZE, SIZE)
    form = Form(dtype, "row", "delayed") if dtype == "e4m3" else None
    stored = "bf16" if form else dtype
    x, weight, y = arrays.tensor(shape, stored, form), arrays.tensor(shape, stored, form), arrays.output(shape, stored)
    algorithms = Algorithms(device_key())
    gemms = Gemms(algorithms)
    forward, kernel = Invocation("linear_forward", (y, x, weight, None, None)), linear_kernels(gemms)["linear_forward"]
    try:
        seconds = _heated(forward.bound(kernel, arrays.scratch(kernel.needed(forward.arguments))))
    finally:
        gemms.close()
    algorithms.save()
    return 2 * SIZE**3 / seconds


def _heated(call: Callable[[], None]) -> float:
    """Seconds of a call on a stream of its own: the median of the second half of HEAT_S of calls back to back."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()  # operands are filled on another stream

    def moment() -> Any:
        event = cupy.cuda.Event()
        event.record(stream)
        return event

    def seconds(marks: list[Any]) -> list[float]:
        marks[-1].synchronize()
        return [cupy.cuda.get_elapsed_time(*pair) / 1e3 for pair in pairwise(marks)]

    with stream:
        call()  # chooses its algorithm
        marks = [moment()]
        for _ in range(3):
            call()
            marks.append(moment())
        count = max(math.ceil(HEAT_S / min(seconds(marks))), 4)
        marks = [moment()]
        for _ in range(count):
            call()
            marks.append(moment())
        times = seconds(marks)
    return statistics.median(times[count // 2 :])


def _copy() -> float:
    """Bytes/s of the faster of two copies: the driver's, and our own kernel's."""
    import cupy

    from llmq.bench.ops import copy_us

    size = min(COPY_BYTES, cupy.cuda.runtime.memGetInfo()[0] // 8)
    return size / copy_us(size, 1) * 1e6
