"""What the CUDA backend does when CUDA fails, on a CuPy that is made up: errors keep their meaning, and runs go on."""

import ctypes
import gc
import importlib.util
import random
import re
import sys
import threading
from contextlib import nullcontext
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest

from llmq.backends import Launch, Needs
from llmq.comm.world import ALONE
from llmq.errors import RefusedMemoryError, UsageError
from llmq.ops.cuda import algorithms
from llmq.ops.cuda.algorithms import Choice

OUT_OF_MEMORY, LAUNCH_FAILURE = 2, 719  # cudaError_t


class CudaError(RuntimeError):
    """CUDARuntimeError."""

    def __init__(self, status):
        super().__init__(f"error {status}")
        self.status = status


class Runtime:
    """Memory that fails with `status`, and a list of the copies."""

    CUDARuntimeError = CudaError
    memcpyHostToDevice, memcpyDeviceToDevice = 1, 3

    def __init__(self):
        self.status, self.calls, self.devices = 0, [], {}
        self.combined, self.has_same_addresses = [], True
        self.refuses = lambda size: self.status

    def malloc(self, size):
        if self.status:
            raise CudaError(self.status)
        return 4096

    def free(self, address):
        self.calls.append(("free", address))

    def memGetInfo(self):
        return 2**30, 2**31

    def memcpyAsync(self, to, source, size, kind, stream):
        self.calls.append(("copy", to, size, kind, stream))

    def streamSynchronize(self, stream):
        self.calls.append(("wait", stream))

    def getDevice(self):
        return 3

    def setDevice(self, device):
        self.devices[threading.get_ident()] = device

    def deviceGetPCIBusId(self, device):
        return f"0000:{device}A:00.0"

    def hostRegister(self, address, size, flags):
        assert self.devices[threading.get_ident()] == 3
        if self.refuses(size):
            raise CudaError(self.status)
        self.calls.append(("lock", address, size, flags))

    def hostUnregister(self, address):
        self.calls.append(("unlock", address))

    def hostAlloc(self, size, flags):
        if self.refuses(size):
            raise CudaError(self.status)
        self.combined.append(ctypes.create_string_buffer(size))
        self.calls.append(("allocate", address := ctypes.addressof(self.combined[-1]), size, flags))
        return address

    def freeHost(self, address):
        self.calls.append(("free on the host", address))

    def deviceGetAttribute(self, attribute, device):
        assert (attribute, device) == (91, 3)
        return int(self.has_same_addresses)


@pytest.fixture
def runtime(monkeypatch):
    """The runtime of the made-up CuPy."""
    found, attributes = Runtime(), {"L2CacheSize": 2**20}
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.cuda, cuda.runtime = cuda, found
    cuda.Device, cuda.Stream = (
        lambda: SimpleNamespace(attributes=attributes),
        lambda non_blocking: SimpleNamespace(ptr=7),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return found


@pytest.fixture
def cuda_memory(runtime, monkeypatch):
    """llmq.backends.cuda_memory on it, known to this test alone."""
    return loaded("llmq.backends.cuda_memory", monkeypatch)


@pytest.fixture
def cuda(cuda_memory, monkeypatch, tmp_path):
    """llmq.backends.cuda on it, likewise, without libraries."""
    monkeypatch.setenv("LLMQ_CACHE_DIR", str(tmp_path))
    found = loaded("llmq.backends.cuda", monkeypatch)
    monkeypatch.setattr(found, "device_key", lambda: "H200")
    for name in ("Gemms", "Cudnn"):
        monkeypatch.setattr(found, name, lambda *arguments, **numbers: None)
    return found


def loaded(name, monkeypatch):
    """A module that is executed again."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_only_an_allocation_that_is_refused_is_a_lack_of_memory(runtime, cuda_memory):
    """What an earlier kernel did wrong may be reported by any later call."""
    for allocate in (
        lambda: cuda_memory.device_memory(100),
        lambda: algorithms._Trial(None, {"a": 100}, 7, "a product"),
    ):
        runtime.status = OUT_OF_MEMORY
        with pytest.raises(RefusedMemoryError) as caught:
            allocate()
        assert caught.value.num_bytes >= 100 and caught.value.free_bytes == 2**30
        runtime.status = LAUNCH_FAILURE
        with pytest.raises(CudaError, match="719"):
            allocate()


def test_host_memory_that_is_not_there_is_refused_and_what_is_not_locked_is_ordinary(runtime, cuda_memory, monkeypatch):
    def refuse(num_bytes):
        raise CudaError(OUT_OF_MEMORY)

    monkeypatch.setattr(sys.modules["cupy.cuda"], "alloc_pinned_memory", refuse, raising=False)
    monkeypatch.setattr(cuda_memory, "host_memory_bytes", lambda: (2000, 1000))
    memory, is_pinned = cuda_memory.pinned(1000)
    assert memory.nbytes == 1000 and not is_pinned
    with pytest.raises(RefusedMemoryError, match="the host refused 1,001 bytes") as caught:
        cuda_memory.pinned(1001)
    assert (caught.value.home, caught.value.num_bytes, caught.value.free_bytes) == ("host", 1001, 1000)


PAGE = 4096
STILL = SimpleNamespace(synchronize=lambda: None)  # a stream with nothing to do


def test_no_array_is_in_two_pieces(runtime, cuda_memory):
    draw = random.Random(0)
    for _ in range(200):
        sizes = [256 * draw.choice((0, 1, draw.randrange(40))) for _ in range(draw.randrange(30))]
        starts = cuda_memory.piece_starts(sizes, 2048)
        ends, offset = [*starts[1:], sum(sizes)], 0
        assert all(end - start >= 2048 for start, end in zip(starts[:-1], ends[:-1], strict=False))
        assert bool(starts) == bool(sum(sizes)) and all(start < end for start, end in zip(starts, ends, strict=False))
        for size in sizes:
            assert not size or any(a <= offset and offset + size <= b for a, b in zip(starts, ends, strict=False))
            offset += size


def test_host_memory_is_locked_piece_by_piece(runtime, cuda_memory):
    """Arrays beside a border have their own bytes; a piece stays locked as long as something views it."""
    stream = SimpleNamespace(synchronize=lambda: runtime.streamSynchronize(7))
    sizes = [3 * PAGE, 256, 5 * PAGE, 256, 256, 2 * PAGE]
    block = cuda_memory.HostBlock(sizes, stream, piece_bytes=3 * PAGE)
    locked = [call for call in runtime.calls if call[0] == "lock"]
    assert sorted(size for _, _, size, _ in locked) == [3 * PAGE, 3 * PAGE, 6 * PAGE]
    assert all(address % PAGE == 0 and flags == 3 for _, address, _, flags in locked) and not block.unpinned_bytes
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    views = [block.view(offset, size) for offset, size in zip(offsets, sizes, strict=True)]
    for number, view in enumerate(views, 1):
        assert view.flags.writeable and not view.any()
        view[:] = number
    assert [set(view.tolist()) for view in views] == [{number} for number in range(1, 7)]
    with pytest.raises(AssertionError, match="in two pieces"):
        block.view(0, 3 * PAGE + 256)
    last = views.pop().view("uint32")
    address = next(start for _, start, size, _ in locked if start <= last.ctypes.data < start + size)
    del block, views, view
    gc.collect()
    kept = ("unlock", address)
    assert len([call for call in runtime.calls if call[0] == "unlock"]) == 2 and kept not in runtime.calls
    assert (last == 0x06060606).all()
    del last
    assert runtime.calls[-2:] == [("wait", 7), kept]


@pytest.mark.parametrize("status", [OUT_OF_MEMORY, 304, 800, 801])
def test_what_the_system_refuses_to_lock_is_ordinary_memory(runtime, cuda_memory, status):
    runtime.status, runtime.refuses = status, lambda size: size > PAGE
    block = cuda_memory.HostBlock([PAGE, 3 * PAGE, PAGE], STILL, piece_bytes=PAGE)
    assert block.unpinned_bytes == 3 * PAGE
    block.view(PAGE, 3 * PAGE)[:] = 1
    del block
    gc.collect()
    assert [call[0] for call in runtime.calls].count("unlock") == 2
    runtime.status = LAUNCH_FAILURE
    with pytest.raises(CudaError, match="719"):
        cuda_memory.HostBlock([3 * PAGE], STILL)


def test_host_memory_says_where_it_is_and_how_long_it_took(runtime, cuda_memory, monkeypatch):
    asked = []
    monkeypatch.setattr(cuda_memory, "numa_node", lambda address: asked.append(address) or 1)
    for is_bound, place in ((True, "on NUMA node 1"), (False, "not bound to NUMA node 1: refused")):
        monkeypatch.setattr(cuda_memory, "bind", lambda block, node, is_bound=is_bound: is_bound)
        said = str(cuda_memory.HostBlock([PAGE, PAGE], STILL, piece_bytes=PAGE))
        times = r"written in \d+\.\d s \(\d+\.\d GB/s\), pinned in \d+\.\d s \(\d+\.\d GB/s\)"
        assert re.fullmatch(rf"Host memory: 8,192 bytes in 2 pieces, {place}: {times}", said), said
    assert asked == ["0000:3a:00.0"] * 2
    empty = cuda_memory.HostBlock([0, 0], STILL)
    assert empty.num_bytes == 0 and empty.view(0, 0).nbytes == 0 and not empty.unpinned_bytes


def test_a_run_whose_memory_is_not_locked_has_no_graphs(cuda, monkeypatch):
    """A captured copy from ordinary memory would wait, which a capture cannot."""
    for unpinned in (0, 5 << 20):
        host = SimpleNamespace(num_bytes=1, unpinned_bytes=unpinned)
        memory = SimpleNamespace(host=host, unpinned_bytes=unpinned)
        monkeypatch.setattr(cuda, "DeviceMemory", lambda *arguments, memory=memory, **flags: memory)
        backend = cuda.CudaBackend()
        backend.memory(Needs({}, {}))
        assert backend.program([])._use_graphs == (not unpinned) and backend.allocated
        assert backend.notices == [] or "refuses to lock 5.0 MiB of host memory" in backend.notices[0]
        assert bool(backend.notices) == bool(unpinned)


def test_write_combined_memory_is_the_drivers(runtime, cuda_memory, monkeypatch):
    """A piece is freed when the last view of it is gone, after the work on the stream."""
    stream = SimpleNamespace(synchronize=lambda: runtime.streamSynchronize(7))
    block = cuda_memory.HostBlock([PAGE, 256, 2 * PAGE], stream, piece_bytes=PAGE, write_combined=True)
    (_, first, *one), (_, second, *other) = runtime.calls
    assert (one, other) == ([PAGE, 7], [256 + 2 * PAGE, 7]) and block.is_combined and not block.unpinned_bytes
    assert re.fullmatch(r"Host memory: 12,544 bytes in 2 pieces, write-combined: pinned in .*", str(block)), str(block)
    last = block.view(PAGE, 256).view("uint32")
    last[:] = 5
    assert last.ctypes.data == second
    del block
    gc.collect()
    assert runtime.calls[2:] == [("wait", 7), ("free on the host", first)]
    assert runtime.combined[1].raw[:4] == b"\5\0\0\0"
    del last
    gc.collect()
    assert runtime.calls[4:] == [("wait", 7), ("free on the host", second)]
    monkeypatch.setattr(cuda_memory, "host_memory_bytes", lambda: (PAGE, PAGE - 1))
    with pytest.raises(RefusedMemoryError, match="the host refused") as caught:
        cuda_memory.HostBlock([PAGE], stream, write_combined=True)
    assert (caught.value.home, caught.value.num_bytes, caught.value.free_bytes) == ("host", PAGE, PAGE - 1)


def test_write_combined_memory_that_is_refused_is_ordinary(runtime, cuda_memory):
    runtime.status, sizes = 801, [PAGE, 3 * PAGE]
    runtime.refuses = lambda size: size > 2 * PAGE and any(call[0] == "allocate" for call in runtime.calls)
    block = cuda_memory.HostBlock(sizes, STILL, piece_bytes=PAGE, write_combined=True)
    gc.collect()
    assert not block.is_combined and block.unpinned_bytes == 3 * PAGE
    assert [call[0] for call in runtime.calls] == ["allocate", "free on the host", "lock"]
    runtime.status = LAUNCH_FAILURE
    with pytest.raises(CudaError, match="719"):
        cuda_memory.HostBlock(sizes, STILL, piece_bytes=PAGE, write_combined=True)


@pytest.mark.parametrize(
    ("unpinned", "same_addresses", "said"), [(0, True, None), (5 << 20, True, "lock 5.0 MiB"), (0, False, "lock 0")]
)
def test_kernels_read_locked_memory_by_the_hosts_addresses_alone(
    runtime, cuda, monkeypatch, unpinned, same_addresses, said
):
    runtime.has_same_addresses = same_addresses
    host = SimpleNamespace(num_bytes=8 << 20, unpinned_bytes=unpinned, is_combined=False)
    memory = SimpleNamespace(host=host, unpinned_bytes=unpinned)
    monkeypatch.setattr(cuda, "DeviceMemory", lambda *arguments, **flags: memory)
    backend = cuda.CudaBackend()
    with pytest.raises(UsageError, match=f"--use-zero-copy: .* 8.0 MiB .* {said}") if said else nullcontext():
        assert backend.memory(Needs({}, {}, in_place=True, write_combined=True)) is memory
        assert "refuses write-combined memory" in backend.notices[0]


@pytest.mark.parametrize(
    ("error", "is_lack"),
    [
        (CudaError(OUT_OF_MEMORY), True),
        (RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), True),
        (MemoryError("Out of memory allocating 512 bytes"), True),
        (RefusedMemoryError("the host refused 3 bytes", home="host", num_bytes=3, free_bytes=2), False),
        (CudaError(LAUNCH_FAILURE), False),
        (RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED"), False),
        (KeyError("x"), False),
    ],
    ids=str,
)
def test_libraries_that_lack_memory_differ_from_those_that_fail(cuda, monkeypatch, error, is_lack):
    """By CUDA's status or a library's words: while algorithms are timed or memory is allocated, and within a program.
    What fails otherwise stays what it is."""
    monkeypatch.setattr(sys.modules["cupy.cuda"], "Stream", lambda non_blocking: Stream())
    monkeypatch.setattr(cuda, "Gemms", lambda _: SimpleNamespace(prepare=lambda _: raising(error)()))
    monkeypatch.setattr(cuda, "DeviceMemory", lambda *_, **flags: raising(error)())
    monkeypatch.setattr(cuda, "planned_problem", lambda *_: "a product")
    monkeypatch.setattr(cuda, "record", lambda op: SimpleNamespace(is_linear=True))
    result = SimpleNamespace(forms=(None,), ref=None, accumulate=False)
    call = SimpleNamespace(op="linear_forward", outputs=(result,), inputs=())
    backend = cuda.CudaBackend()
    program = cuda._Program([Launch(raising(error))], {"main": Stream()}, False, ALONE)
    for work in (lambda: backend.prepare([call]), lambda: backend.memory(Needs({}, {})), program):
        with pytest.raises(RefusedMemoryError if is_lack else type(error)) as caught:
            work()
        if is_lack:
            assert "one of its libraries" in str(caught.value)
            assert caught.value.num_bytes is None and caught.value.free_bytes == 2**30
        else:
            assert caught.value is error


def raising(error):
    """A launch that fails."""

    def run():
        raise error

    return run


def test_memory_in_a_cycle_is_freed_before_its_stream_is_gone(runtime, cuda_memory):
    """The collector finalizes what a cycle holds in any order, and a stream that is gone takes the process with it."""

    class Destroyed:
        ptr, gone = 7, False

        def synchronize(self):
            assert not self.gone
            runtime.streamSynchronize(self.ptr)

        def __del__(self):
            self.gone = True

    class Owner:
        pass

    stream, owner = Destroyed(), Owner()
    cuda_memory.give_back_with(owner, runtime.free, 4096, stream)
    owner.stream, owner.itself = stream, owner
    del stream, owner
    gc.collect()
    assert runtime.calls == [("wait", 7), ("free", 4096)]


class Stream:
    """A stream whose capture ends with an error, if a call within it failed."""

    def __init__(self):
        self.failed = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def begin_capture(self):
        pass

    def end_capture(self):
        if self.failed:
            raise CudaError(901)
        return SimpleNamespace(upload=lambda stream: None, launch=lambda stream: None)


def test_what_failed_within_a_capture_is_what_is_reported(cuda):
    stream, wrong = Stream(), []

    def call():
        if wrong:
            stream.failed = True
            raise ValueError("the cause")

    program = cuda._Program([Launch(call)], {"main": stream}, True, ALONE)
    program()
    wrong.append(1)
    with pytest.raises(ValueError, match="the cause"):
        program()
    wrong.clear()
    stream.failed = False
    program()


def test_python_is_called_each_time_between_graphs(cuda):
    backend, counts = cuda.CudaBackend(), {"before": 0, "python": 0, "after": 0}
    backend._streams = {"main": Stream()}

    def count(name):
        counts[name] += 1

    launches = [Launch(partial(count, name), is_python=name == "python") for name in counts]
    run = backend.program(launches)
    for _ in range(5):
        run()
    assert counts == {"before": 2, "python": 5, "after": 2}, "once as launches, once to be captured"


def test_bits_that_will_not_repeat_and_kernels_that_are_not_kept_are_reported(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "kernel_notices", kernels := [])
    old = {"algorithm": bytes(64).hex(), "microseconds": 1.0, "first_microseconds": 1.0, "candidates": 8}
    backend = cuda.CudaBackend(given={"device": "H200", "algorithms": {"a product": old}})
    assert backend.notices == []
    backend._algorithms.add("a product", Choice(**{**old, "algorithm": bytes([1] * 64).hex()}))
    kernels.append("kernels are not kept")
    assert len(backend.notices) == 2 and "does not repeat the bits" in backend.notices[0]
    assert backend.notices[1] == "kernels are not kept"
    assert cuda.CudaBackend(given={"device": "H100", "algorithms": {}}).notices[0] == backend.notices[0]
