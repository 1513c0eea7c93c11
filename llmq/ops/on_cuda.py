"""Routines on arrays of a GPU. The launchers run once for calls of equal shapes, on addresses that stand for those of
operands. What they launch is kept, and a call puts its own addresses in: it costs little more than its launches.

Kept launches depend on shapes, on which operands share memory, and on how far all of it is aligned.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field
from functools import cache, cached_property, partial, reduce
from operator import or_
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops import cuda
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.algorithms import Algorithms
from llmq.ops.cuda.attention import AttentionPlan, AttentionShape, Cudnn, attention_kernels
from llmq.ops.cuda.cublaslt import Gemm, Gemms, Pointers, device_key
from llmq.ops.cuda.linear import linear_kernels
from llmq.ops.exchange import NAMES, STORED_AS, operand
from llmq.ops.routines import Given, Numbers, Operands, Routine, Written, output
from llmq.ops.seam import Arguments, record
from llmq.tensor import DTYPES, Form, Ref, scale_shape, stored_shape

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
        self.strides = strides or tuple(self.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
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

    Slots are those of the operands; of tensors that live as long as the call; of what launches use in turn; and of no
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

    def make(self, shape: tuple[int, ...], dtype: str, form: Form | None = None) -> Tensor:
        """A tensor that lives as long as the call."""
        scale = None
        if form is not None and form.scaling is not None:
            scale = self._array(scale_shape(shape, form), form.scales.dtype)
        return Tensor("made", self._array(stored_shape(shape, form), form.dtype if form else dtype), shape, form, scale)

    def _array(self, shape: tuple[int, ...], dtype: str) -> Any:
        found = StandIn(self.address(self._made) + self.made_bytes, shape, stored(dtype))
        self.made_bytes += -(-found.nbytes // ALIGNMENT) * ALIGNMENT
        return found

    def run(self, op: str, *handles: Any, **numbers: Any) -> None:
        """Has the launcher of an op launch into this."""
        kernel = self._context.kernels[op]
        size = kernel.needed(_arguments(op, handles, numbers), gpu.capability())
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
            self._zeros(*one)
        else:
            self._kernel(*one)

    def _kernel(
        self,
        function: Any,
        grid: tuple[int, ...],
        threads: int,
        arguments: tuple[Any, ...],
        shared_bytes: int,
        early: bool,
    ) -> None:
        assert not early, "it would begin before the call's turn"
        moved = [(i, *self._place(value)) for i, value in enumerate(arguments) if type(value) is int]
        block, function = (threads,), getattr(function, "kernel", function)  # of the current GPU

        def step(at: Sequence[int]) -> None:
            values = [*arguments]
            for i, slot, offset in moved:
                values[i] = at[slot] + offset
            function(grid, block, tuple(values), shared_mem=shared_bytes)

        self.steps.append(step)

    def _zeros(self, start: int, num_bytes: int) -> None:
        slot, offset = self._place(start)
        self.steps.append(lambda at: gpu.zero(at[slot] + offset, num_bytes))

    def product(self, run: Callable[[Pointers, int], None], pointers: Pointers, workspace: int) -> None:
        """A matrix product."""
        places = [self._place(address) for address in (*astuple(pointers), workspace)]
        lock = self._context.lock

        def step(at: Sequence[int]) -> None:
            *addresses, used = (at[slot] + offset for slot, offset in places)
            with lock:  # descriptors have the pointers of one call
                run(Pointers(*addresses), used)

        self.steps.append(step)

    def attention(self, plan: AttentionPlan, pointers: Mapping[str, int], workspace: int) -> None:
        """A graph of cuDNN."""
        places = {name: self._place(address) for name, address in pointers.items()}
        (slot, offset), context = self._place(workspace), self._context

        def step(at: Sequence[int]) -> None:
            found = {name: at[slot] + offset for name, (slot, offset) in places.items()}
            with context.lock:
                context.cudnn.run(plan, found, at[slot] + offset)

        self.steps.append(step)


class _Products:
    """`Gemms` for launchers, whose products are kept."""

    def __init__(self, context: _Context) -> None:
        self._context, self.bound = context, WeakKeyDictionary[Any, Any]()

    def bind(self, problem: Gemm, pointers: Pointers, alpha: float) -> Callable[[int], None]:
        """As `Gemms.bind`."""
        kept = self._context.kept
        assert kept is not None
        return partial(kept.product, self._context.gemms.ready(problem, alpha), pointers)


class _Attentions:
    """`Cudnn` for launchers, whose graphs are kept."""

    def __init__(self, context: _Context) -> None:
        self._context = context

    def plan(self, kind: str, shape: AttentionShape) -> AttentionPlan:
        """As `Cudnn.plan`."""
        return self._context.cudnn.plan(kind, shape)

    def run(self, plan: AttentionPlan, pointers: Mapping[str, int], workspace: int) -> None:
        """As `Cudnn.run`."""
        assert self._context.kept is not None
        self._context.kept.attention(plan, pointers, workspace)


@dataclass(eq=False)
class _Context:
    """The libraries of a GPU, made when a call needs them, and the launches that are being kept."""

    lock: Any = field(default_factory=threading.Lock)
    kept: _Kept | None = None

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
        """Of all ops; those of libraries are kept like the others."""
        products: Any = _Products(self)
        attention: Any = _Attentions(self)
        return cuda.kernels({**linear_kernels(products), **attention_kernels(attention)})


@cache
def _context(device: int) -> _Context:
    return _Context()


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
    routine: Routine,
    inputs: Mapping[str, Given],
    results: Mapping[str, Written | None],
    numbers: Numbers,
    layout: tuple[tuple[int, ...], int, int],
) -> Callable[[Sequence[int], Sequence[int], Any], None]:
    """A function of the addresses of inputs (the scales of a copy after it) and of results, and of an allocator."""
    import cupy

    first, dtype = next((name, x.dtype) for name, x in inputs.items())
    if dtype == "fp64":
        raise UsageError(
            f"{routine.name}: {first} is in fp64, which kernels of the GPU lack: use fp32 or bf16, or the CPU"
        )
    pattern, alignment, _ = layout
    context = _context(cupy.cuda.runtime.getDevice())
    with context.lock:
        kept = context.kept = _Kept(context, len(pattern), alignment % ALIGNMENT)
        places = map(kept.address, pattern)
        given = {name: _tensor(name, x, places) for name, x in inputs.items()}
        outputs = {name: _output(name, result, places) for name, result in results.items()}
        ops = {op: partial(kept.run, op) for op in context.kernels}
        about = {**dict.fromkeys(routine.inputs), **given}
        with gpu.given_to(kept.take):
            routine.compute(Operands(ops, kept.make, outputs, about, numbers, dtype))
        if "gemms" in vars(context):
            context.gemms.algorithms.save()  # what is lost with the folder is timed again by the next process
    return _bound(kept)


def stand_in(slot: int, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...]) -> StandIn:
    """An operand of `launches`, by its place among them; strides in bytes."""
    return StandIn((slot + 1) * SLOT, shape, stored(dtype), strides)


def launches(op: str, handles: Sequence[Any], numbers: Numbers, num_operands: int) -> tuple[list[Step], int]:
    """What an op launches on the current GPU for handles over `stand_in`s, and bytes of scratch: steps that take the
    addresses of these, 0, that of the scratch, and 0."""
    import cupy

    kept = _Kept(_context(cupy.cuda.runtime.getDevice()), num_operands, 0)
    with gpu.given_to(kept.take):
        kept.run(op, *handles, **numbers)
    return kept.steps, kept.used_bytes


def _bound(kept: _Kept) -> Callable[[Sequence[int], Sequence[int], Any], None]:
    steps, made_bytes, num_bytes = kept.steps, kept.made_bytes, kept.made_bytes + kept.used_bytes

    def run(read: Sequence[int], written: Sequence[int], allocate: Any) -> None:
        memory = _scratch(num_bytes, allocate) if num_bytes else None  # goes back once all is on the stream
        start = 0 if memory is None else int(getattr(memory, "ptr", 0)) or operand(memory, "scratch").place
        if start % ALIGNMENT:
            raise UsageError(
                f"scratch at {start} is not aligned to {ALIGNMENT} bytes: give memory of a whole allocation"
            )
        at = (*read, *written, start, start + made_bytes, 0)
        for step in steps:
            step(at)

    return run


def _scratch(num_bytes: int, allocate: Any) -> Any:
    """Memory of the caller, or of CuPy's pool."""
    if allocate is not None:
        return allocate(num_bytes)
    import cupy

    return cupy.cuda.alloc(num_bytes)


def _tensor(name: str, x: Given, places: Iterator[int]) -> Tensor:
    """An input at the next place, its scales at the one after."""
    array: Any = StandIn(next(places), x.data.shape, stored(x.data.dtype), x.data.strides)
    scale: Any = None if x.scale is None else StandIn(next(places), x.scale.shape, stored(x.scale.dtype))
    return Tensor(name, array, x.shape, x.form, scale)


def _output(name: str, result: Written | None, places: Iterator[int]) -> Output:
    """An output at the next place, if it is wanted."""
    if result is None:
        return output(name, None, None)
    return output(name, StandIn(next(places), result.shape, stored(result.dtypes[0]), result.strides), result)


def stored(dtype: str) -> np.dtype:
    """Dtype of arrays that hold numbers of a dtype."""
    return DTYPES[STORED_AS.get(dtype, dtype)]


def _arguments(op: str, handles: Sequence[Any], numbers: Mapping[str, Any]) -> Arguments:
    """A call's arguments as a plan has them, for what its kernel refuses and needs."""
    about = record(op)
    outputs = dict(zip(about.outputs, handles, strict=False))
    inputs = zip(about.inputs, handles[len(outputs) :], strict=True)
    reads = {name: _ref(x) for name, x in inputs if x is not None}
    writes = {name: tuple(map(_ref, result.tensors)) for name, result in outputs.items()}
    added = frozenset(name for name, result in outputs.items() if result.accumulate)
    return Arguments(reads, writes, numbers, added)


def _ref(tensor: Tensor) -> Ref:
    """A copy's is not said to be in the dtype of its values."""
    dtype = NAMES[tensor.array.dtype] if tensor.form is None else tensor.form.dtype
    return Ref(tensor.name, "activation", tensor.shape, dtype, form=tensor.form)
