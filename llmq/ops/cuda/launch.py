"""What all launchers share: dtypes as type names, handles as pointers, wanted forms as a constant, and the call.

Arrays are CuPy arrays: bf16 with the dtype of ml_dtypes, fp8 as uint8 (the form says which format). Launches go to
CuPy's current stream, and everything but pointers and counts is a constant of the kernel.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda.compile import Constants, device_facts, kernel
from llmq.ops.seam import Arguments, Function
from llmq.tensor import DTYPES, LARGEST, Form, Ref

if TYPE_CHECKING:
    from llmq.ops.record import Call

TYPES = {"fp32": "float", "bf16": "bf16", "int32": "int"}
SIZES = {"bf16": 2, "e4m3": 1, "int8": 1, "uint8": 1}  # bytes; of others 4
NAMES = {DTYPES[name]: name for name in TYPES}
TILE_THREADS, TILE_LANES, TILE_ROWS, SUMS_ROWS = 256, 32, 128, 256  # forms.cuh
SUM_THREADS, SUM_COLUMNS = 1024, 32  # columns.cuh
VALUE, COPY, ROW, COL, SUMS, AMAX = 1, 2, 4, 8, 16, 32  # forms.cuh
SMALLER_BATCH = "a smaller --batch-size with more --grad-accumulation"
GRID_SIDE = 65535  # blocks along the second and the third axis of a grid, at most
DEFAULT_SHARED_BYTES = 48 * 1024  # that a block gets unasked, what its kernel declares included
STREAMS = 64  # of cast.cu
WORD = 0xFFFFFFFF
STATIC_BYTES = 1024  # of shared memory that a kernel declares at most, where its launcher gives it more

_streams: dict[int, int] = {}  # their numbers, by address


@dataclass(frozen=True)
class Kernel:
    """What the backend asks of an op. `launch` takes what the reference takes, operands by position and numbers by
    name, and `scratch` where it needs some.

    `scratch_bytes(call)` is what a call needs beside its arguments, as an array of the GPU aligned to 256 bytes that
    other calls of its lane use in turn. `refuse(call, capability)` raises UsageError for what the op cannot do on a
    card of this capability (90 is 9.0). None: never.
    """

    launch: Callable[..., None]
    scratch_bytes: Callable[[Arguments], int] | None = None
    refuse: Callable[[Arguments, int], None] | None = None

    def needed(self, call: Call | Arguments, capability: int = 90) -> int:
        """Bytes of scratch of a call; UsageError for one that cannot be made on a card of this capability."""
        if self.scratch_bytes is None and self.refuse is None:
            return 0  # plans of many layers ask for tens of thousands of calls
        given = call if isinstance(call, Arguments) else Arguments.of(call)
        if self.refuse is not None:
            self.refuse(given, capability)
        return self.scratch_bytes(given) if self.scratch_bytes is not None else 0


def asks(scratch: Any = None, refuse: Any = None) -> Callable[[Function], Function]:
    """Attaches to a launcher the scratch that its op needs, and what it refuses (see `Kernel`)."""

    def attached(function: Function) -> Function:
        vars(function)["kernel"] = Kernel(function, scratch, refuse)
        return function

    return attached


def at_most(most: int, count: int, units: str, what: str, instead: str = SMALLER_BATCH) -> None:
    """UsageError where there are more of something than a launch takes."""
    if count > most:
        raise UsageError(f"{count} {units} are more than the {most} that {what} takes on the GPU: use {instead}")


def type_of(*tensors: Tensor | Output | None) -> str:
    """Type name of values in the kernels, which have one dtype; UsageError for what they do not know (fp64)."""
    kinds = [kind_of(dtype_of(tensor), tensor.name) for tensor in tensors if tensor is not None]
    assert len({*kinds}) == 1, f"{[tensor.name for tensor in tensors if tensor is not None]} are in {kinds}"
    return kinds[0]


def dtype_of(tensor: Tensor | Output) -> str:
    """Name of a value's dtype."""
    return tensor.dtype if isinstance(tensor, Output) else NAMES.get(tensor.array.dtype, str(tensor.array.dtype))


def kind_of(dtype: str, name: str) -> str:
    """Type name of a dtype; UsageError, which says of what, as `type_of`."""
    if dtype not in TYPES:
        raise UsageError(f"{name} is stored in {dtype}, which the GPU kernels do not have: use --device cpu")
    return TYPES[dtype]


def size_of(*types: str) -> int:
    """Bytes of the largest of these types."""
    return max(SIZES.get(name, 4) for name in types)


def access(width: int, *types: str) -> int:
    """Numbers per access: 16 bytes of the largest type, less where `width` is no multiple of that."""
    number = math.gcd(width, 16 // size_of(*types))
    if number * min(SIZES.get(name, 4) for name in types) < 4:
        raise UsageError(f"a tensor {width} wide cannot be read 4 bytes at a time in bf16: use an even width")
    return number


def access_to(ref: Ref) -> int:
    """Numbers per access to the rows of a planned tensor."""
    return access(ref.shape[-1], kind_of(ref.dtype, ref.name))


def pointer(tensor: Tensor | None) -> int:
    """Address of a tensor's bytes, 0 for none."""
    return 0 if tensor is None else address(tensor.array)


def cap_bits(cap: float | None) -> int:
    """A soft-cap as a constant of a kernel, the bits of its f32; 0 for none. UsageError for what is no cap."""
    if cap is None:
        return 0
    if not 0 < float(np.float32(cap)) < math.inf:
        raise UsageError(f"a soft-cap of {cap:g} caps nothing: use a positive number, or none")
    return int(np.float32(cap).view(np.int32))


def address(array: Any) -> int:
    """Address of an array of the GPU (CuPy), or of the host's locked memory (NumPy), which has one for both."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def scale_of(tensor: Tensor | None) -> int:
    """Address of a tensor's scales, 0 for none."""
    return 0 if tensor is None or tensor.scale is None else address(tensor.scale)


def zero(start: int, num_bytes: int) -> None:
    """Sets bytes of the GPU to zero, in the order of the current stream."""
    _put.get()(Zeros(start, num_bytes))


def random_key(seed: int, stream: int) -> tuple[np.uint32, np.uint32]:
    """The key of random words (llmq/ops/reference/random.py)."""
    return np.uint32(seed & WORD), np.uint32((stream ^ (seed >> 32)) & WORD)


def room(scratch: Any, num_bytes: int) -> int:
    """Address of scratch (a CuPy array, or None) that has room for `num_bytes`; 0 if none are needed."""
    if not num_bytes:
        return 0
    given = 0 if scratch is None else scratch.nbytes
    assert num_bytes <= given, f"{num_bytes} bytes of scratch are needed and {given} were given"
    return address(scratch)


def plain(output: Output) -> int:
    """Address of an output that is stored as its value only, 0 if it is not read."""
    forms = [tensor.form for tensor in output.tensors]
    assert forms in ([], [None]), f"{output.name}: the kernel writes the value, not {forms}"
    return pointer(output.tensors[0]) if forms else 0


def adds(output: Output) -> np.int32:
    """Whether an output is added to what is there."""
    return np.int32(output.wanted and output.accumulate)


def forms(output: Output, *, may_be_cut: bool = False) -> tuple[dict[str, int | str], tuple[int, ...]]:
    """Constants FORMS and E4M3 of an output, and the arguments of OUTPUT_PARAMETERS in forms.cuh.

    `may_be_cut`: the kernel gets the `height` of a transposed copy, of which the output may be some columns.
    """
    assert not output.accumulate, f"{output.name}: forms are written, not added to"
    assert may_be_cut or height(output) in (0, rows_of(output.shape)), f"{output.name}: columns of a taller copy"
    found: dict[int, Tensor] = {}
    for tensor in output.tensors:
        bit = _bit(tensor.form, output)
        assert bit not in found, f"{output.name}: two forms in place {bit}"
        found[bit] = tensor
    quantized = [tensor for bit, tensor in found.items() if bit in (ROW, COL)]
    formats = {tensor.form.dtype for tensor in quantized if tensor.form is not None}
    assert len(formats) <= 1 and len(output.amax) <= 1, f"{output.name}: one fp8 format at a time, not {formats}"
    scale = scale_of(quantized[0]) if quantized else 0
    amax = [address(cell) for cell in output.amax.values()]
    wanted = sum(found) + (AMAX if amax else 0)
    pointers = tuple(pointer(found.get(bit)) for bit in (VALUE, COPY, ROW, COL, SUMS))
    return {"FORMS": wanted, "E4M3": int(formats != {"e5m2"})}, (*pointers, scale, amax[0] if amax else 0)


def height(output: Output) -> int:
    """Rows of the whole whose transposed copy an output writes, all or some columns of; 0 without one."""
    turned = [tensor.array for tensor in output.tensors if tensor.form is not None and tensor.form.layout == "col"]
    return turned[0].strides[0] // turned[0].dtype.itemsize if turned else 0


def _bit(form: Form | None, output: Output) -> int:
    if form is None:
        return VALUE
    if form.layout == "colsum":
        return SUMS
    if form.dtype in LARGEST and form.scaling is not None:
        return COL if form.layout == "col" else ROW
    assert form.dtype == "bf16" and form.layout == "row" and output.dtype == "fp32", (
        f"{output.name}: no kernel for {form}"
    )
    return COPY


def rows_of(shape: tuple[int, ...]) -> int:
    """Number of rows of a tensor seen as (rows, last axis)."""
    return math.prod(shape[:-1])


def sums_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a partial row for every 256 rows of a tensor."""
    return -(-rows_of(shape) // SUMS_ROWS) * shape[-1] * 4


def tiles(rows: int, columns: int, wanted: int, per_lane: int, transposed: int) -> int:
    """Blocks of an elementwise kernel: tiles of 256 rows for column sums, `transposed` for that form, else 32 rows."""
    height = SUMS_ROWS if wanted & SUMS else transposed if wanted & COL else 32
    width = 128 if wanted & (COL | SUMS) and per_lane > 4 else 32 * per_lane
    return -(-columns // width) * -(-rows // height)


def capability() -> int:
    """Compute capability of the current device: 90 for 9.0."""
    import cupy

    return device_facts(cupy.cuda.runtime.getDevice())[0]


def shared_bytes_limit(card: int | None = None) -> int:
    """Bytes of shared memory that a block may have on a card of this capability (90 is 9.0), or on this device."""
    return {80: 163, 90: 227, 100: 227, 103: 227}.get(capability() if card is None else card, 99) * 1024


def multiprocessors() -> int:
    """Multiprocessors of the current device: for grids whose size no result depends on."""
    import cupy

    return device_facts(cupy.cuda.runtime.getDevice())[1]


def stream_index() -> int:
    """Of the current stream, among those that have asked: of memory in which the blocks of a kernel meet, so that calls
    on other streams may run at the same time. From the 65th stream on, numbers of the first ones return."""
    import cupy

    return _streams.setdefault(int(cupy.cuda.get_current_stream().ptr), len(_streams) % STREAMS)


class KernelLaunch(NamedTuple):
    """A kernel as CuPy has it, ready to be put on a stream. Of `arguments` those of type int are addresses."""

    function: Any
    grid: tuple[int, ...]
    threads: int
    arguments: tuple[Any, ...]
    shared_bytes: int
    early: bool

    def put(self) -> None:
        """Puts it on CuPy's current stream."""
        if self.early:
            launch_early(self.function, self.grid, self.threads, self.arguments, self.shared_bytes)
        else:
            self.function(self.grid, (self.threads,), self.arguments, shared_mem=self.shared_bytes)


class Zeros(NamedTuple):
    """Bytes from an address on that are to be zero."""

    start: int
    num_bytes: int

    def put(self) -> None:
        """Sets them, in the order of CuPy's current stream."""
        import cupy

        cupy.cuda.runtime.memsetAsync(self.start, 0, self.num_bytes, cupy.cuda.get_current_stream().ptr)


Take = Callable[[KernelLaunch | Zeros], None]
_put: ContextVar[Take] = ContextVar("_put", default=lambda one: one.put())


@contextmanager
def given_to(take: Take) -> Iterator[None]:
    """Meanwhile `take` gets what launchers would put on the stream in this thread."""
    token = _put.set(take)
    try:
        yield
    finally:
        _put.reset(token)


def _argument(given: Any) -> Any:
    if isinstance(given, Output):
        return plain(given)
    return pointer(given) if given is None or isinstance(given, Tensor) else given


def launch(
    name: str,
    entry: str,
    blocks: int | tuple[int, ...],
    threads: int,
    arguments: tuple[Any, ...],
    constants: Constants,
    *,
    shared_bytes: int = 0,
    early: bool = False,
) -> None:
    """Puts a kernel on the current stream; nothing for an empty grid.

    Of `arguments` a tensor or an output is its address (`pointer`, `plain`), None is 0, and integers are 64 bits wide.

    `early`: from sm_90 on it may begin before the kernels before it are done. Until it calls `await_previous`
    (common.cuh), it reads only what nothing has written since the last kernel that was not early began.
    """
    grid = (blocks,) if isinstance(blocks, int) else blocks
    if not math.prod(grid):
        return
    arguments = tuple(_argument(given) for given in arguments)
    function = kernel(name, entry, constants)
    if shared_bytes + STATIC_BYTES > DEFAULT_SHARED_BYTES:
        function.max_dynamic_shared_size_bytes = shared_bytes
    _put.get()(KernelLaunch(function, grid, threads, arguments, shared_bytes, early and capability() >= 90))


def launch_early(
    function: Any, grid: tuple[int, ...], threads: int, arguments: tuple[Any, ...], shared_bytes: int
) -> None:
    """Puts a CuPy function on CuPy's current stream, to begin before the kernel before it is done ("programmatic
    dependent launch", from 9.0 on; a captured graph has it too); RuntimeError if the driver refuses it.

    CuPy has no launch attributes, so the driver is called.
    """
    import cupy
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, cupy.cuda.get_current_stream().ptr
    config.attrs, config.numAttrs = [attribute], 1
    values = [np.array(value, np.uint64) if type(value) is int else np.asarray(value) for value in arguments]
    places = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
    (status,) = driver.cuLaunchKernelEx(config, driver.CUfunction(function.kernel.ptr), ctypes.addressof(places), 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver refuses a launch of {grid} blocks of {threads} threads: {status.name}")
