"""Where a micro-batch's time goes, family by family of ops, and what each would take at the measured ceilings.

Data sheets state peaks that no program reaches: under load a card's power limit lowers the clock, and a copy pays for
turning the memory's bus around. The ceilings are measured in a second or two: one large matrix product per dtype (ours:
cuBLASLt, timed choice of algorithms), one large copy. They run back to back for HEAT_S, on random data, which draws the
power that training draws; the median of the second half counts.

The work of a call comes from its op's record. Its roofline is the larger of its FLOPs at the rate of the card's
large matrix product and its bytes at the rate of the card's large copy: a better kernel or another order of calls could
win the difference.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from llmq.comm.world import ALONE, World
from llmq.engine.measure import Speed, zipf_batch
from llmq.hardware import device as devices
from llmq.hardware.device import Device
from llmq.operands import Output, Tensor
from llmq.ops.record import Call
from llmq.ops.seam import Arguments, record
from llmq.plan.names import storage_name
from llmq.plan.passes.place import Placement
from llmq.plan.plan import Plan
from llmq.plan.spec import Spec
from llmq.tensor import DTYPES, Form

WHOLE = "all ops"  # the only rung where no single ops were timed
HEAD = (".head.", "head.logits", "head.weight", "embed.weight")  # in the names of what the head's linear map writes
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


class CallWork(NamedTuple):
    """What a call has to do: FLOPs of products in `dtype`, and bytes to move at least."""

    dtype: str
    flops: int
    num_bytes: int


@dataclass(frozen=True)
class Rung:
    """A family: milliseconds of a micro-batch, measured and at the ceilings, and its work in the same unit."""

    family: str
    calls: int  # in one micro-step or update
    ms: float
    roofline_ms: float
    flops: float
    num_bytes: float


@dataclass(frozen=True)
class Ladder:
    """All families, the longest first, of a micro-batch that takes `micro_batch_ms` in training."""

    rungs: tuple[Rung, ...]
    micro_batch_ms: float

    @property
    def gaps_ms(self) -> float:
        """What training takes beyond its ops run one by one; negative where they overlap."""
        return self.micro_batch_ms - sum(rung.ms for rung in self.rungs)

    @property
    def share(self) -> float:
        """Share of the ceilings: the rooflines of all calls over the time that training takes."""
        return sum(rung.roofline_ms for rung in self.rungs) / self.micro_batch_ms


def family(op: str, written: str) -> str:
    """The family that a call is counted in, by its op and the name of what it writes first."""
    known = record(op)
    return "head" if known.is_linear and any(part in written for part in HEAD) else known.family


def ladder(speed: Speed, ceilings: Ceilings) -> Ladder:
    """The ladder of the calls that were timed, on generated tokens; one rung if none were."""
    if not speed.calls:
        roofline = _roofline_ms(speed.plan, speed.tokens_per_step, ceilings)
        return Ladder((Rung(WHOLE, 0, speed.micro_batch_ms, roofline, 0.0, 0.0),), speed.micro_batch_ms)
    spec, parts = speed.plan.spec, dict[str, list[tuple[float, ...]]]()
    share_of_update, used = spec.batch_size * spec.seq_len / speed.tokens_per_step, different_tokens(spec)
    for timed in speed.calls:
        program = speed.plan.programs[timed.program]
        call = program.calls[timed.index]
        work = work_of(call, program.places, used)
        part = (timed.ms, 1e3 * roofline_s(work, ceilings), work.flops, work.num_bytes)
        times = share_of_update if timed.program == "update" else 1.0
        parts.setdefault(family(call.op, written(call)), []).append(tuple(times * number for number in part))
    rungs = [Rung(name, len(found), *map(sum, zip(*found, strict=True))) for name, found in parts.items()]
    return Ladder(tuple(sorted(rungs, key=lambda rung: -rung.ms)), speed.micro_batch_ms)


def _roofline_ms(plan: Plan, tokens_per_step: int, ceilings: Ceilings) -> float:
    """Least milliseconds of a micro-batch in a rank's steps of `tokens_per_step`, without communication."""
    spec, used, total = plan.spec, different_tokens(plan.spec), 0.0
    for name, times in (("middle", 1.0), ("update", spec.batch_size * spec.seq_len / tokens_per_step)):
        program = plan.programs[name]
        calls = [call for call in program.calls if record(call.op).family != "collectives"]
        total += times * sum(roofline_s(work_of(call, program.places, used), ceilings) for call in calls)
    return 1e3 * total


def different_tokens(spec: Spec) -> int:
    """How many different tokens a generated micro-batch has."""
    return np.unique(zipf_batch(spec.config.vocab_size, spec.batch_size, spec.seq_len, spec.seed).tokens).size


def written(call: Call) -> str:
    """The name of what a call writes first."""
    return next(result.ref.name for result in call.outputs if result is not None)


def roofline_s(work: CallWork, ceilings: Ceilings) -> float:
    """Least seconds of a call at the ceilings."""
    multiplying = work.flops / ceilings.flops[work.dtype] if work.flops else 0.0
    return max(multiplying, work.num_bytes / ceilings.bytes_per_s)


def work_of(call: Call, places: Mapping[str, Placement], used: float) -> CallWork:
    """The work of a call: `places` show what is computed in place; an embedding op touches `used` rows of its table."""
    op = record(call.op)
    given = replace(Arguments.of(call), in_place=_in_place(call, places), different_tokens=used)
    return CallWork(op.rate_dtype(given), op.flops(given), op.num_bytes(given))


def _in_place(call: Call, places: Mapping[str, Placement]) -> frozenset[str]:
    """The outputs of a call whose value lies where the input does that they may share with."""
    op = record(call.op)
    results = dict(zip(op.outputs, call.outputs, strict=True))
    inputs = dict(zip(op.inputs, call.inputs, strict=True))
    found = set()
    for output, source in op.shares.items():
        result, given = results[output], inputs[source]
        at = places.get(storage_name(given)) if given is not None else None
        is_value = result is not None and None in result.forms
        if at is not None and result is not None and is_value and places.get(storage_name(result.ref)) == at:
            found.add(output)
    return frozenset(found)


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
        seconds = heated(partial(forward, y, x, weight, None, None, scratch=scratch))
    finally:
        gemms.close()
    algorithms.save()
    return 2 * SIZE**3 / seconds


def _random(dtype: str) -> Tensor:
    """A random matrix on the GPU."""
    import cupy

    from llmq.ops.cuda.algorithms import fill_random

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
    return 2 * source.nbytes / min(heated(driver), heated(own))


def heated(call: Callable[[], None]) -> float:
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
