"""The GPU: one allocation at the offsets of the plan, and every program captured once as a CUDA graph.

A program runs eagerly the first time, doing real work: kernels are compiled, attention plans built and matmul
algorithms timed then, which a capture could not do. The second time it is captured, and from then on the graph runs.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from cupy.cuda import runtime

from llmq.backends import Launch, Needs, Op, Run, between, groups, in_turn, parts
from llmq.backends.cuda_memory import (
    PIECE_BYTES,
    HostBlock,
    device_memory,
    give_back_with,
    has_same_addresses,
    pinned,
    told_of_refusals,
)
from llmq.backends.cuda_room import DeviceRoom
from llmq.backends.host import set_every
from llmq.comm.world import ALONE, OneRank
from llmq.disk import shown
from llmq.errors import RefusedMemoryError, UsageError
from llmq.model.held import HostRoom, Room, Values
from llmq.ops import cuda
from llmq.ops.cuda.algorithms import Algorithms
from llmq.ops.cuda.attention import Cudnn, attention_kernels
from llmq.ops.cuda.compile import notices as kernel_notices
from llmq.ops.cuda.cublaslt import Gemms, device_key
from llmq.ops.cuda.launch import Kernel, capability, launch
from llmq.ops.cuda.linear import linear_kernels, planned_problem
from llmq.ops.seam import record
from llmq.plan.arena import aligned
from llmq.screen import Report, counted, unreported
from llmq.tensor import DTYPES, stored_bytes, stored_dtype, stored_shape

if TYPE_CHECKING:
    from llmq.comm.nccl import NcclWorld
    from llmq.ops.record import Call

FP8 = (DTYPES["e4m3"], DTYPES["e5m2"])
STAGED_BYTES = 1 << 20  # host writes up to this size do not wait for the GPU
STAGED = 8  # of them may be under way
OTHER_ALGORITHMS = (
    "The checkpoint's matrix-product algorithms are those of another GPU, library or llmq, or this one refuses some, "
    "so this run does not repeat the bits that the old one would have had"
)


class DeviceMemory:
    """One cudaMalloc: persistent storages one after the other, then the slots of a program. What lives on the host is
    in pinned memory in the same way, as NumPy arrays.

    fp8 storages of the GPU are uint8 arrays, as CuPy has no dtype for them; `read` and `write` convert.
    """

    homes_in_order = frozenset({"device"})

    def __init__(self, needs: Needs, stream: Any) -> None:
        persistent, arena_bytes, _, write_combined = needs
        self._stream, self._arena_bytes = stream, arena_bytes["device"]
        self._dtypes = {name: stored_dtype(ref) for name, ref in persistent.items()}
        self._ends = {
            home: sum(aligned(stored_bytes(ref)) for ref in persistent.values() if ref.home == home)
            for home in arena_bytes
        }
        total = self._ends["device"] + arena_bytes["device"]
        address = device_memory(total)
        give_back_with(self, runtime.free, address, stream)
        self._owned = cupy.cuda.UnownedMemory(address, total, None)
        hosted = [aligned(stored_bytes(ref)) for ref in persistent.values() if ref.home == "host"]
        self.host = HostBlock([*hosted, arena_bytes["host"]], stream, PIECE_BYTES, write_combined=write_combined)
        self._arrays: dict[str, Any] = {}
        offsets = dict.fromkeys(arena_bytes, 0)
        for name, ref in persistent.items():
            shape = stored_shape(ref.shape, ref.form)
            self._arrays[name] = self._view(ref.home, offsets[ref.home], shape, self._dtypes[name])
            offsets[ref.home] += aligned(stored_bytes(ref))
        runtime.memsetAsync(address, 0, total, stream.ptr)
        self._staging, self._scalars = _Staging(stream), pinned(512)[0]

    @property
    def unpinned_bytes(self) -> int:
        """Bytes of host memory that the system refused to lock."""
        return self._staging.unpinned_bytes + self.host.unpinned_bytes

    def array(self, name: str) -> Any:
        """The storage itself: a CuPy array, or a NumPy array of the host."""
        return self._arrays[name]

    def place(self, home: str, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """An array at an offset of a home's arena."""
        return self._view(home, self._ends[home] + offset, shape, dtype)

    @contextmanager
    def room(self, home: str) -> Iterator[Room]:
        """Where copies of what is held in a home are made; on the GPU in the arena, in the order of the stream."""
        if home == "host":
            self._stream.synchronize()  # what was put on the stream before may read what is written
            yield HostRoom()
            return
        with self._stream:
            yield self._device_room()

    def _device_room(self) -> DeviceRoom:
        """The whole arena."""
        return DeviceRoom(self._view, self._ends["device"], self._arena_bytes, self._stream)

    def write(self, name: str, values: Values) -> None:
        """Sets a storage from host values of any float dtype, rounded to nearest even, in the order of the stream.

        Up to 1 MiB the values go through pinned memory and the host does not wait. Many of another dtype are rounded,
        and those that repeat themselves are made, on the GPU.
        """
        array = self._arrays[name]
        if not isinstance(array, np.ndarray) and array.nbytes > STAGED_BYTES:
            with self._stream:
                if self._device_room().set(array, values):
                    return
        values = np.asarray(values)
        if isinstance(array, np.ndarray):
            self._stream.synchronize()  # what was put on the stream before may read it
            array[...] = values
            return
        host = np.ascontiguousarray(np.broadcast_to(values.astype(self._dtypes[name], copy=False), array.shape))
        if host.nbytes <= STAGED_BYTES:
            self._staging.copy(array.data.ptr, host)
            return
        runtime.memcpyAsync(array.data.ptr, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, self._stream.ptr)
        self._stream.synchronize()

    def read(self, name: str, into: np.ndarray | None = None) -> np.ndarray:
        """A copy of a storage on the host, in memory of its own or `into` an array; waits for everything before it."""
        array = self._arrays[name]
        host = np.empty(array.shape, self._dtypes[name]) if into is None else into
        if isinstance(array, np.ndarray):
            if self.host.is_combined:
                self._read_combined(host, array)
                return host
            self._stream.synchronize()
            host[...] = array
            return host
        self._start_copy(host, array)
        self._stream.synchronize()
        return host

    def _start_copy(self, host: np.ndarray, array: Any) -> None:
        """As many bytes of an array of the GPU as the host's has."""
        runtime.memcpyAsync(host.ctypes.data, array.data.ptr, host.nbytes, runtime.memcpyDeviceToHost, self._stream.ptr)

    def _read_combined(self, host: np.ndarray, array: np.ndarray) -> None:
        """Copies write-combined memory, which the CPU reads at a hundredth of its speed, by way of the GPU's arena, in
        which nothing lives between programs."""
        address, size = int(self._owned.ptr) + self._ends["device"], self._arena_bytes
        for start in range(0, array.nbytes, max(size, 1)):
            count = min(size, array.nbytes - start)
            for target, source in ((address, array.ctypes.data + start), (host.ctypes.data + start, address)):
                runtime.memcpyAsync(target, source, count, runtime.memcpyDefault, self._stream.ptr)
        self._stream.synchronize()

    def start_read(self, name: str) -> Callable[[], np.ndarray]:
        """A function that waits for a copy of a storage of the GPU as it is now, and no longer."""
        array, dtype = self._arrays[name], self._dtypes[name]
        buffer, _ = pinned(array.nbytes)
        self._start_copy(buffer, array)
        event = cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)

        def wait() -> np.ndarray:
            event.synchronize()
            return buffer.view(dtype).reshape(array.shape).copy()

        return wait

    def read_scalars(self, names: Sequence[str]) -> list[float]:
        """First elements of some storages, waiting once."""
        found = []
        for index, name in enumerate(names):
            dtype = self._dtypes[name]
            found.append(self._scalars[8 * index :][: dtype.itemsize].view(dtype))
            self._start_copy(found[-1], self._arrays[name])
        self._stream.synchronize()
        return [float(value[0]) for value in found]

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Within, CuPy works on the stream, after what is on the one that is current before; then it waits."""
        _after(cupy.cuda.get_current_stream(), [self._stream])
        with self._stream:
            yield
        self._stream.synchronize()

    def borrow(self, names: Iterable[str], other: Any) -> None:
        """Makes storages of another memory, which is not given back before this, ones of this."""
        self._lender = other
        for name in names:
            self._arrays[name], self._dtypes[name] = other._arrays[name], other._dtypes[name]

    def fill(self, name: str, value: float) -> None:
        """Sets every element of a storage."""
        array = self._arrays[name]
        if isinstance(array, np.ndarray):
            self._stream.synchronize()
            set_every(array, value)
        elif value == 0:
            runtime.memsetAsync(array.data.ptr, 0, array.nbytes, self._stream.ptr)
        else:
            self.write(name, np.full(array.shape, value))

    def _view(self, home: str, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        if home == "host":
            size = int(np.prod(shape)) * dtype.itemsize
            return self.host.view(offset, size).view(dtype).reshape(shape)
        kind = np.dtype(np.uint8) if dtype in FP8 else dtype
        return cupy.ndarray(shape, kind, memptr=cupy.cuda.MemoryPointer(self._owned, offset))


class _Staging:
    """A ring of pinned buffers for small host-to-device copies; a buffer is used again once its copy is done."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._buffers, are_pinned = zip(*(pinned(STAGED_BYTES) for _ in range(STAGED)), strict=True)
        self.unpinned_bytes = STAGED_BYTES * are_pinned.count(False)
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(STAGED)]
        self._next = 0

    def copy(self, target: int, host: np.ndarray) -> None:
        """Starts a copy of `host` to the device address `target`."""
        index, self._next = self._next, (self._next + 1) % STAGED
        event, buffer = self._events[index], self._buffers[index]
        event.synchronize()
        buffer[: host.nbytes] = host.reshape(-1).view(np.uint8)
        runtime.memcpyAsync(target, buffer.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, self._stream.ptr)
        event.record(self._stream)


class CudaBackend:
    """The GPU's ops on one stream, with the handles of the libraries behind them.

    `given` are the GEMM algorithms of an earlier run (`algorithms`), which repeat its bits.
    """

    takes_scratch = True

    def __init__(
        self,
        *,
        use_graphs: bool = True,
        deterministic: bool = True,
        given: Mapping[str, Any] | None = None,
        world: NcclWorld | OneRank = ALONE,
    ) -> None:
        self._notices: list[str] = []
        self.allocated = ""
        self.world = world
        self._use_graphs = use_graphs
        self._free_bytes, _ = runtime.memGetInfo()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._streams = {"main": self.stream}  # by lane
        self._algorithms = Algorithms(device_key(), given)
        self._gemms = Gemms(self._algorithms)
        attention = attention_kernels(Cudnn(deterministic=deterministic))
        self._kernels: Mapping[str, Kernel] = cuda.kernels({**linear_kernels(self._gemms), **attention})
        self.ops: Mapping[str, Op] = between(world, {name: one.launch for name, one in self._kernels.items()})

    def scratch_bytes(self, call: Call) -> int:
        """Bytes that a call needs beside its arguments. UsageError for what cuDNN or the kernels lack on this GPU."""
        return self._kernels[call.op].needed(call, capability())

    def prepare(self, calls: Iterable[Call], report: Report = unreported) -> None:
        """Chooses an algorithm for every matrix product of the plan, by timing what the table lacks."""
        problems: dict[Any, None] = {}
        for call in calls:
            result = call.outputs[0]
            if record(call.op).is_linear and result is not None and result.forms:
                problems[planned_problem(call.op, result.ref, result.accumulate, call.inputs)] = None
        with told_of_refusals(), self.stream:
            for problem in counted(problems, len(problems), report):
                self._gemms.prepare(problem)
        if unsaved := self._algorithms.save():
            self._notices.append(unsaved)

    @property
    def notices(self) -> list[str]:
        """What the user should know of this GPU, of the caches on disk, and of bits that will not repeat."""
        lost = [] if self._algorithms.given_fits else [OTHER_ALGORITHMS]
        return [*lost, *self._notices, *kernel_notices]

    @property
    def algorithms(self) -> dict[str, Any]:
        """The GEMM algorithms in use, for the run folder and checkpoints."""
        return self._algorithms.facts()

    def take(self, algorithms: Mapping[str, Any]) -> None:
        """Multiplies by the algorithms of another rank from here on, as far as it has the same GPU."""
        self._algorithms.take(algorithms)

    def peak_bytes(self) -> int:
        """Device memory that was free when this backend began and is not now: nothing is given back before the end."""
        return self._free_bytes - int(runtime.memGetInfo()[0])

    def host_bytes(self, num_bytes: int) -> np.ndarray:
        """Page-locked memory, or ordinary memory where the system refuses to lock that much. MemoryError without it."""
        try:
            return HostBlock([num_bytes], self.stream).view(0, num_bytes)
        except RefusedMemoryError as error:
            raise MemoryError(str(error)) from error

    def memory(self, needs: Needs) -> DeviceMemory:
        """Memory of the current device, and of the host as far as the plan has something there. UsageError where
        kernels cannot read that `in_place`."""
        with told_of_refusals():
            memory = DeviceMemory(needs, self.stream)
        self.allocated = str(memory.host) if memory.host.num_bytes else ""
        if needs.in_place and memory.host.num_bytes and (memory.host.unpinned_bytes or not has_same_addresses()):
            raise UsageError(
                f"--use-zero-copy: kernels do not read the {shown(memory.host.num_bytes)} of host memory, of which the "
                f"system refuses to lock {shown(memory.host.unpinned_bytes)} (see ulimit -l): leave it out"
            )
        if needs.write_combined and not memory.host.is_combined:
            self._notices.append(
                "The system refuses write-combined memory: what lives on the host is in ordinary memory"
            )
        if memory.unpinned_bytes:
            self._notices.append(
                f"The system refuses to lock {shown(memory.unpinned_bytes)} of host memory (see ulimit -l): copies "
                "between it and the GPU wait for each other, and programs run without CUDA graphs"
            )
        # A captured copy from ordinary memory would be one that waits.
        self._use_graphs = self._use_graphs and not memory.host.unpinned_bytes
        return memory

    def program(self, launches: Sequence[Launch]) -> Run:
        """One function that makes all launches, each lane in order on a stream of its own, without waiting for them."""
        for each in launches:
            if each.lane not in self._streams:
                self._streams[each.lane] = cupy.cuda.Stream(non_blocking=True)
        made = []
        for part in parts(launches):
            use_graphs = self._use_graphs and not any(each.is_python for each in part)
            made.append(_Program(part, self._streams, use_graphs, self.world))
        return in_turn(made)


class _Program:
    """Launches that run eagerly once, then as a graph. Other lanes begin after what the main one had to do before, and
    the main one ends after all of them."""

    def __init__(
        self, launches: Sequence[Launch], streams: Mapping[str, Any], use_graphs: bool, world: NcclWorld | OneRank
    ) -> None:
        self._launches, self._use_graphs, self._world = launches, use_graphs, world
        self._groups = list(groups(launches))
        self._main, self._streams = streams["main"], streams
        self._sides = [streams[lane] for lane in sorted({each.lane for each in launches} - {"main"})]
        awaited = {index for each in launches for index in each.waits}
        self._events = {index: cupy.cuda.Event(disable_timing=True) for index in awaited}
        self._known: defaultdict[int, dict[str, Any]] = defaultdict(dict)  # to the world, by a group's first launch
        self._graph: Any = None
        self._runs = 0

    def __call__(self) -> None:
        """RefusedMemoryError where a launch, its kernel, a library or the graph finds no memory."""
        with told_of_refusals():
            self._run()

    def _run(self) -> None:
        self._runs += 1
        if self._use_graphs and self._graph is None and self._runs > 1:
            self._graph = self._captured()
            if any(each.collective for each in self._launches):
                self._world.captured(self)
        if self._graph is not None:
            self._graph.launch(self._main)
        else:
            self._launch()

    def forget(self) -> None:
        """Ends the graph: the next run makes the launches one by one."""
        self._graph, self._runs = None, 0

    def _captured(self) -> Any:
        # What is collected meanwhile may free memory of the GPU, which waits for a stream, and that ends a capture.
        was_enabled = gc.isenabled()
        gc.disable()
        self._main.begin_capture()
        try:
            self._launch()
        except BaseException:
            with suppress(runtime.CUDARuntimeError):  # the call that failed has ended the capture itself
                self._main.end_capture()
            raise
        finally:
            if was_enabled:
                gc.enable()
        graph = self._main.end_capture()
        graph.upload(self._main)
        return graph

    def _launch(self) -> None:
        _after(self._main, self._sides)
        for indices, before, runs, after in self._groups:
            launches = [self._launches[index] for index in indices]
            stream = self._streams[launches[0].lane]
            for other in sorted({other for each in launches for other in each.waits}):
                stream.wait_event(self._events[other])
            with stream:
                for run in before:
                    run()
                with self._collective(self._known[indices[0]]) if launches[0].collective else nullcontext():
                    for run in runs:
                        run()
                for run in after:
                    run()
            for index in self._events.keys() & indices:
                self._events[index].record(stream)
        for side in self._sides:
            _after(side, [self._main])

    @contextmanager
    def _collective(self, known: dict[str, Any]) -> Iterator[None]:
        """Collectives that are made as one, counted before and after for the watchdog."""
        begun, ended = getattr(self._world, "counts", (None, None))
        if begun is not None:
            launch("count", "count", 1, 1, (begun,), {})
        with self._world.group(known):
            yield
        if ended is not None:
            launch("count", "count", 1, 1, (ended,), {})


def _after(stream: Any, others: Sequence[Any]) -> None:
    """What comes next on `others` runs after what `stream` has to do so far."""
    for other in others:
        event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        other.wait_event(event)
