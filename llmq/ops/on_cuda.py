"""Routines on arrays of a GPU. The launchers run once for calls of equal shapes, on addresses that stand for those of
operands. What they launch is kept, and a call puts its own addresses in: it costs little more than its launches.

Kept launches depend on shapes, on which operands share memory, and on how far all of it is aligned.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, field
from functools import cache, cached_property, partial, reduce
from operator import or_
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Tensor
from llmq.ops import cuda
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.algorithms import Algorithms
from llmq.ops.cuda.attention import AttentionPlan, AttentionShape, Cudnn, attention_kernels
from llmq.ops.cuda.cublaslt import Gemm, Gemms, Pointers, device_key
from llmq.ops.cuda.linear import linear_kernels
from llmq.ops.exchange import NAMES, operand, stored, strides_of
from llmq.ops.seam import Arguments, record
from llmq.tensor import DTYPES, Ref

SLOT = 1 << 44  # bytes between the addresses that stand for operands: more than a GPU has
ALIGNMENT = 256  # beyond which more helps no kernel
LEAST_ALIGNMENT = 16  # that kernels take for granted
Step = Callable[[Sequence[int]], None]  # puts a launch on the stream, with the addresses of all slots


class StandIn:
    """An array of the GPU as launchers see it: shape, dtype, strides and an address."""

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None = None
    ) -> None:
        self.shape, self.dtype, self.itemsize = shape, dtype, dtype.itemsize
        self.ndim, self.size = len(shape), math.prod(shape)
        self.nbytes = self.size * self.itemsize
        self.strides = strides or strides_of(shape, dtype.itemsize)
        self.data = SimpleNamespace(ptr=address)

    def reshape(self, *shape: int) -> StandIn:
        """The same numbers, which lie together, as (-1, columns) or (-1,)."""
        columns = math.prod(shape[1:])
        return StandIn(self.data.ptr, (self.size // columns, *shape[1:]), self.dtype)

    def __getitem__(self, cuts: slice | tuple[slice, ...]) -> StandIn:
        """A piece of the first axes."""
        address, shape = self.data.ptr, [*self.shape]
        for axis, cut in enumerate(cuts if isinstance(cuts, tuple) else (cuts,)):
            start, stop, _ = cut.indices(shape[axis])
            address, shape[axis] = address + start * self.strides[axis], stop - start
        return StandIn(address, tuple(shape), self.dtype, self.strides)


class _Kept:
    """The launches of a call, in order, and the scratch that they need.

    Slots are those of the operands; of arrays that live as long as the call; of what launches use in turn; and of no
    memory, whose address is 0.
    """

    def __init__(self, context: _Context, num_operands: int, offset: int) -> None:
        self._context, self._offset = context, offset
        self._made, self._used, self._none = range(num_operands, num_operands + 3)
        self.steps: list[Step] = []
        self.made_bytes = self.used_bytes = 0

    def address(self, slot: int) -> int:
        """What stands for the address of a slot."""
        return (slot + 1) * SLOT + self._offset

    def new(self, shape: tuple[int, ...], dtype: str) -> StandIn:
        """An array that lives as long as the call."""
        found = StandIn(self.address(self._made) + self.made_bytes, shape, stored(dtype))
        self.made_bytes += -(-found.nbytes // ALIGNMENT) * ALIGNMENT
        return found

    def run(self, op: str, *handles: Any, **numbers: Any) -> None:
        """Has the launcher of an op launch into this."""
        kernel = self._context.kernels[op]
        size = kernel.needed(arguments_of(op, handles, numbers), gpu.capability())
        self.used_bytes = max(self.used_bytes, size)
        scratch = {"scratch": StandIn(self.address(self._used), (size,), np.dtype(np.uint8))} if size else {}
        kernel.launch(*handles, **numbers, **scratch)

    def _place(self, address: int) -> tuple[int, int]:
        """The slot of an address, and how far into it that is."""
        if not address:
            return self._none, 0
        slot, offset = divmod(address - self._offset, SLOT)
        return slot - 1, offset

    def take(self, one: gpu.KernelLaunch | gpu.Zeros) -> None:
        """What a launcher puts on the stream."""
        if isinstance(one, gpu.Zeros):
            (slot, offset), num_bytes = self._place(one.start), one.num_bytes
            self.steps.append(lambda at: gpu.zero(at[slot] + offset, num_bytes))
            return
        assert not one.early, "it would begin before the call's turn"
        moved = [(i, *self._place(value)) for i, value in enumerate(one.arguments) if type(value) is int]
        block, function = (one.threads,), getattr(one.function, "kernel", one.function)  # of the current GPU
        grid, arguments, shared_bytes = one.grid, one.arguments, one.shared_bytes

        def step(at: Sequence[int]) -> None:
            values = [*arguments]
            for i, slot, offset in moved:
                values[i] = at[slot] + offset
            function(grid, block, tuple(values), shared_mem=shared_bytes)

        self.steps.append(step)

    def of_library(self, run: Callable[[list[int]], None], addresses: Iterable[int]) -> None:
        """What a library puts on the stream."""
        places, lock = [*map(self._place, addresses)], self._context.lock

        def step(at: Sequence[int]) -> None:
            found = [at[slot] + offset for slot, offset in places]
            with lock:  # descriptors have the pointers of one call
                run(found)

        self.steps.append(step)


@dataclass(eq=False)
class _Context:
    """The libraries of a GPU, made when a call needs them, and the launches that are being kept.

    For launchers it is `Gemms` and `Cudnn`, whose work is kept.
    """

    lock: Any = field(default_factory=threading.Lock)
    kept: _Kept | None = None
    bound: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)

    @cached_property
    def gemms(self) -> Gemms:
        """Matrix products."""
        return Gemms(Algorithms(device_key()))

    @cached_property
    def cudnn(self) -> Cudnn:
        """Attention."""
        return Cudnn()

    @cached_property
    def kernels(self) -> dict[str, gpu.Kernel]:
        """Of all ops."""
        libraries: Any = self
        return cuda.kernels({**linear_kernels(libraries), **attention_kernels(libraries)})

    def bind(self, problem: Gemm, pointers: Pointers, alpha: float) -> Callable[[int], None]:
        """As `Gemms.bind`."""
        run, addresses = self.gemms.ready(problem, alpha), astuple(pointers)
        return lambda workspace: self._keep(lambda found: run(Pointers(*found[:-1]), found[-1]), *addresses, workspace)

    def plan(self, kind: str, shape: AttentionShape) -> AttentionPlan:
        """As `Cudnn.plan`."""
        return self.cudnn.plan(kind, shape)

    def run(self, plan: AttentionPlan, pointers: Mapping[str, int], workspace: int) -> None:
        """As `Cudnn.run`."""
        names = (*pointers,)
        self._keep(
            lambda found: self.cudnn.run(plan, dict(zip(names, found, strict=False)), found[-1]),
            *pointers.values(),
            workspace,
        )

    def _keep(self, run: Callable[[list[int]], None], *addresses: int) -> None:
        assert self.kept is not None
        self.kept.of_library(run, addresses)

    @contextmanager
    def keeping(self, num_operands: int, offset: int = 0) -> Iterator[_Kept]:
        """Meanwhile what launchers launch in this thread is kept."""
        with self.lock:
            kept = self.kept = _Kept(self, num_operands, offset)
            with gpu.given_to(kept.take):
                yield kept
            if "gemms" in vars(self):
                self.gemms.algorithms.save()  # what is lost with the folder is timed again by the next process


@cache
def _context(device: int) -> _Context:
    return _Context()


def _current() -> _Context:
    import cupy

    return _context(cupy.cuda.runtime.getDevice())


def on(device: int) -> AbstractContextManager[Any]:
    """Within, the GPU is the current one."""
    import cupy

    return nullcontext() if cupy.cuda.runtime.getDevice() == device else cupy.cuda.Device(device)


def layout(read: Sequence[int], written: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
    """What launches depend on beside shapes: which operands are at one address, the alignment of all, and the stream,
    by the memory in which the blocks of a kernel meet."""
    places = [*read, *written]
    bits = reduce(or_, places, ALIGNMENT)
    alignment = bits & -bits
    if alignment < LEAST_ALIGNMENT:
        raise UsageError(f"an array begins at an address that is no multiple of {LEAST_ALIGNMENT} bytes: copy it first")
    pattern = range(len(places)) if len({*places}) == len(places) else map(places.index, places)
    return tuple(pattern), alignment, gpu.stream_index()


def bind(
    compute: Callable[..., None], layout: tuple[tuple[int, ...], int, int]
) -> Callable[[Sequence[int], Sequence[int], Any], None]:
    """A function of the addresses of inputs (the scales of a copy after it) and of results, and of an allocator."""
    pattern, alignment, _ = layout
    context = _current()
    with context.keeping(len(pattern), alignment % ALIGNMENT) as kept:
        places = map(kept.address, pattern)
        ops = {op: partial(kept.run, op) for op in context.kernels}
        compute(ops, lambda shape, dtype, strides: StandIn(next(places), shape, stored(dtype), strides), kept.new)
    steps, made_bytes, num_bytes = kept.steps, kept.made_bytes, kept.made_bytes + kept.used_bytes

    def run(read: Sequence[int], written: Sequence[int], allocate: Any) -> None:
        _held, start = _scratch(num_bytes, allocate)  # goes back once all is on the stream
        at = (*read, *written, start, start + made_bytes, 0)
        for step in steps:
            step(at)

    return run


def _scratch(num_bytes: int, allocate: Any) -> tuple[Any, int]:
    """Memory of the caller, or of CuPy's pool, and its address."""
    if not num_bytes:
        return None, 0
    import cupy

    memory = (allocate or cupy.cuda.alloc)(num_bytes)
    if hasattr(memory, "ptr"):  # as CuPy's pool gives it
        return memory, memory.ptr
    found = operand(memory, "scratch")
    size = math.prod(found.shape) * DTYPES[found.dtype].itemsize
    if found.device is None or found.place % ALIGNMENT or size < num_bytes:
        where = "the CPU" if found.device is None else hex(found.place)
        need = f"{num_bytes} bytes of the GPU, aligned to {ALIGNMENT}"
        raise UsageError(f"allocate({num_bytes}) gave {size} bytes at {where}, not {need}: give a whole allocation")
    return memory, found.place


def stand_in(slot: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...]) -> StandIn:
    """An operand of `launches`, by its place among them; strides in bytes."""
    return StandIn((slot + 1) * SLOT, shape, stored(dtype), strides)


def launches(op: str, handles: Sequence[Any], numbers: Mapping[str, Any], num_operands: int) -> tuple[list[Step], int]:
    """What an op launches on the current GPU for handles over `stand_in`s, and bytes of scratch: steps that take the
    addresses of these, 0, that of the scratch, and 0."""
    with _current().keeping(num_operands) as kept:
        kept.run(op, *handles, **numbers)
    return kept.steps, kept.used_bytes


def arguments_of(op: str, handles: Sequence[Any], numbers: Mapping[str, Any]) -> Arguments:
    """A call's arguments as a plan has them, for what its kernel refuses and needs."""
    about = record(op)
    outputs = dict(zip(about.outputs, handles, strict=False))
    inputs = zip(about.inputs, handles[len(outputs) :], strict=True)
    reads = {name: _ref(x) for name, x in inputs if x is not None}
    writes = {name: tuple(map(_ref, result.tensors)) for name, result in outputs.items()}
    return Arguments(reads, writes, numbers, frozenset(name for name, result in outputs.items() if result.accumulate))


def _ref(tensor: Tensor) -> Ref:
    """One name for one array. A copy's is not said to be in the dtype of its values."""
    dtype = NAMES[np.dtype(tensor.array.dtype)] if tensor.form is None else tensor.form.dtype
    return Ref(f"{tensor.name} {id(tensor.array)}", "activation", tensor.shape, dtype, form=tensor.form)
