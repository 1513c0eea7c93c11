"""The measured ceilings of this device, in a second or two: one large matrix product per dtype, one large copy.

Data sheets state peaks that no program reaches: under load a card's power limit lowers the clock, and a copy pays for
turning the memory's bus around. Products are ours (cuBLASLt, timed choice of algorithms) and run back to back for
HEAT_S, on random data, which draws the power that training draws; the median of the second half counts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from llmq.comm.world import ALONE, World
from llmq.hardware import device as devices
from llmq.hardware.device import Device
from llmq.operands import Output, Tensor
from llmq.tensor import DTYPES, Form

SIZE = 8192  # of the product's matrices
HEAT_S = 0.4  # of products back to back
COPY_BYTES = 2**30  # read and written by the copy, or an eighth of the free memory if that is less
HOST_COPY_BYTES = 2**26


@dataclass(frozen=True)
class Ceilings:
    """FLOP/s of matrix products by the dtype of their operands, and bytes/s of a copy, read and written."""

    flops: Mapping[str, float]
    bytes_per_s: float


@dataclass(frozen=True)
class Machine:
    """The device that is measured, its facts as in the log, its peak FLOP/s by dtype, and its ceilings."""

    where: Device
    system: Mapping[str, Any]
    peaks: Mapping[str, float]
    ceilings: Ceilings


def look_at(where: Device, dtypes: Iterable[str], world: World = ALONE) -> Machine:
    """The machine with its ceilings for products of `dtypes`: those of the first rank, for which the others wait."""
    peaks, system = devices.peaks(where), devices.system_facts(where)
    found = asdict(measure_ceilings(where.kind, dtypes)) if world.rank == 0 else None
    return Machine(where, system, peaks, Ceilings(**world.gather(found)[0]))


def measure_ceilings(kind: str, dtypes: Iterable[str]) -> Ceilings:
    """The ceilings of the current `cuda` device or of the `cpu`, for products of `dtypes`."""
    wanted = sorted(set(dtypes))
    if kind == "cpu":
        rate = devices.measured_peak("fp32")  # whatever the storage
        return Ceilings(dict.fromkeys(wanted, rate), _host_copy())
    import cupy

    bytes_per_s = _copy()  # by the free memory, so before the products
    found = Ceilings({dtype: _product(dtype) for dtype in wanted}, bytes_per_s)
    cupy.get_default_memory_pool().free_all_blocks()
    return found


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
    """FLOP/s of our matrix product, with both operands of `dtype` and the summed axis innermost."""
    import cupy

    from llmq.ops.cuda.algorithms import Algorithms
    from llmq.ops.cuda.cublaslt import WORKSPACE_BYTES, Gemms, device_key
    from llmq.ops.cuda.linear import linear_kernels

    stored = "bf16" if dtype == "e4m3" else dtype
    x, weight, result = _random(dtype), _random(dtype), _random(stored)
    scratch = cupy.empty(WORKSPACE_BYTES, np.uint8)
    algorithms = Algorithms(device_key())
    gemms = Gemms(algorithms)
    forward = linear_kernels(gemms)["linear_forward"].launch
    y = Output("y", result.shape, stored, (result,))
    try:
        seconds = _heated(partial(forward, y, x, weight, None, None, scratch=scratch))
    finally:
        gemms.close()
    algorithms.save()
    return 2 * SIZE**3 / seconds


def _random(dtype: str) -> Tensor:
    """A random matrix on the GPU."""
    import cupy

    from llmq.ops.cuda.timing import fill_random

    array = cupy.empty((SIZE, SIZE), np.uint8 if dtype == "e4m3" else DTYPES[dtype])
    fill_random(array.data.ptr, array.nbytes, dtype, cupy.cuda.get_current_stream().ptr)
    if dtype != "e4m3":
        return Tensor("random", array, array.shape)
    return Tensor("random", array, array.shape, Form(dtype, "row", "delayed"), cupy.full(1, 0.01, np.float32))


def _copy() -> float:
    """Bytes/s of the faster of two copies: the driver's, and our own kernel's."""
    import cupy

    from llmq.ops import cuda

    shape = (min(COPY_BYTES, cupy.cuda.runtime.memGetInfo()[0] // 8) // 4 // 2**16 * 2**16,)
    target, source = cupy.zeros((2, *shape), DTYPES["bf16"])
    out = Output("copy", shape, "bf16", (Tensor("copy", target, shape),))
    own = partial(cuda.OPS["cast"], out, Tensor("x", source, shape))
    driver = partial(target.data.copy_from_device_async, source.data, source.nbytes)
    return 2 * source.nbytes / min(_heated(driver), _heated(own))


def _heated(call: Callable[[], None]) -> float:
    """Seconds of a call on a stream of its own: the median of the second half of HEAT_S of calls back to back."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)

    def times(count: int) -> list[float]:
        events = [cupy.cuda.Event() for _ in range(count + 1)]
        with stream:
            events[0].record(stream)
            for event in events[1:]:
                call()
                event.record(stream)
        events[-1].synchronize()
        return [cupy.cuda.get_elapsed_time(*pair) / 1e3 for pair in pairwise(events)]

    cupy.cuda.runtime.deviceSynchronize()  # operands are filled on another stream
    times(1)  # chooses its algorithm
    count = max(math.ceil(HEAT_S / min(times(3))), 4)
    return statistics.median(times(count)[count // 2 :])
