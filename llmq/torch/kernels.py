"""llmq's ops on the memory of torch's tensors: the NumPy reference on the CPU, kernels on CUDA on torch's stream.

No bytes are copied, and what an op needs beside its arguments comes from torch's allocator. On CUDA a launcher runs
once for each set of shapes, and later calls put what it launched on the stream with addresses of their own
(`llmq.ops.on_cuda`): a launcher would take longer than some kernels, and eager training makes hundreds of calls a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch

from llmq.operands import Output, Tensor
from llmq.ops.reference import OPS
from llmq.tensor import DTYPES, Form

NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int32: "int32",
    torch.uint8: "uint8",
}
DEVICES = ("cpu", "cuda")
ALIGNMENT = 16  # bytes: what kernels read at a time
MOST_PLANS = 4096  # that are kept: lengths of batches may never repeat


class Copy(NamedTuple):
    """A quantized copy of a tensor of `shape` and `dtype`: its bytes in `form`, and their scale."""

    data: torch.Tensor
    scale: torch.Tensor
    form: Form
    shape: tuple[int, ...]
    dtype: str


Operand: TypeAlias = torch.Tensor | Copy | None
Written: TypeAlias = torch.Tensor | tuple[Copy, ...] | None  # copies of one value


class Planned(NamedTuple):
    """The launches of a call, as `llmq.ops.on_cuda.launches` gives them."""

    steps: Sequence[Callable[[Sequence[int]], None]]
    scratch_bytes: int


def takes(*tensors: torch.Tensor) -> bool:
    """Whether kernels have these tensors' dtype, which is one, and their device."""
    first = tensors[0]
    known = (torch.float32, torch.bfloat16) if first.is_cuda else (torch.float32, torch.bfloat16, torch.float64)
    return first.device.type in DEVICES and first.dtype in known and all(t.dtype is first.dtype for t in tensors)


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that torch would make a product with x in: autocast's, where that is on."""
    device = x.device.type
    is_cast = device in DEVICES and x.dtype is not torch.float64 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_cast else x.dtype


def ready(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy of it if its memory is not laid out as kernels read it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def run(op: str, outputs: Sequence[Written], inputs: Sequence[Operand], **numbers: Any) -> None:
    """Runs the op of this name, on contiguous tensors of one device. Outputs that are None are not computed."""
    operands = (*outputs, *inputs)
    tensors = [tensor for operand in operands for tensor in _tensors(operand)]
    if not tensors[0].is_cuda:
        OPS[op](*(_output(y, _host) for y in outputs), *(_input(x, _host) for x in inputs), **numbers)
        return
    device = tensors[0].get_device()
    address = torch._C._cuda_getCurrentRawStream(device)
    about = [op, device, address, *numbers.values()]
    about += [None if x is None else x.dtype if isinstance(x, torch.Tensor) else _forms(x) for x in operands]
    for tensor in tensors:
        about.append(tensor.shape)
        if not tensor.is_contiguous():
            about.append(tensor.stride())
    key = tuple(about)
    with torch.cuda.device(device) if device != torch._C._cuda_getDevice() else _HERE, _stream(address, device):
        plan = _plans.get(key)
        if plan is None:
            if len(_plans) >= MOST_PLANS:
                _plans.clear()
            plan = _plans[key] = planned(op, outputs, inputs, numbers)
        put(plan, tensors)


def put(plan: Planned, tensors: Sequence[torch.Tensor]) -> None:
    """Puts the launches of a plan on CuPy's current stream, for the tensors of a call in their order."""
    start = 0
    if plan.scratch_bytes:  # free for others once this is queued: torch gives it to work on this stream alone
        scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=tensors[0].device)
        start = scratch.data_ptr()
    at = (*[tensor.data_ptr() for tensor in tensors], 0, start, 0)
    for step in plan.steps:
        step(at)


_plans: dict[tuple[Any, ...], Planned] = {}
_HERE = nullcontext()


@cache
def _stream(address: int, device: int) -> Any:
    """One of torch's streams as CuPy has it."""
    import cupy

    return cupy.cuda.ExternalStream(address, device)


def _tensors(operand: Operand | Written) -> tuple[torch.Tensor, ...]:
    """The memory that an operand has."""
    if operand is None:
        return ()
    if isinstance(operand, torch.Tensor):
        return (operand,)
    if isinstance(operand, Copy):
        return (operand.data, operand.scale)
    return tuple(tensor for copy in operand for tensor in (copy.data, copy.scale))


def _forms(operand: Copy | tuple[Copy, ...]) -> tuple[Any, ...]:
    copies = (operand,) if isinstance(operand, Copy) else operand
    return tuple(copy[2:] for copy in copies)


def _host(tensor: torch.Tensor, form: Form | None = None) -> Any:
    """A tensor of the CPU as NumPy has it."""
    if tensor.dtype in (torch.bfloat16, torch.uint8):
        dtype = "bf16" if form is None and tensor.dtype is torch.bfloat16 else form.dtype if form else "uint8"
        return tensor.detach().view(torch.uint8 if form else torch.int16).numpy().view(DTYPES[dtype])
    return tensor.detach().numpy()


def _input(x: Operand, array: Callable[..., Any]) -> Tensor | None:
    if x is None:
        return None
    if isinstance(x, Copy):
        return Tensor("x", array(x.data, x.form), x.shape, x.form, array(x.scale))
    return Tensor("x", array(x), tuple(x.shape))


def _output(y: Written, array: Callable[..., Any]) -> Output:
    if y is None:
        return Output("y", (), "fp32", ())
    if isinstance(y, torch.Tensor):
        found = _input(y, array)
        assert found is not None
        return Output("y", found.shape, NAMES[y.dtype], (found,))
    copies = tuple(copy for copy in (_input(one, array) for one in y) if copy is not None)
    return Output("y", y[0].shape, y[0].dtype, copies)


def planned(op: str, outputs: Sequence[Written], inputs: Sequence[Operand], numbers: dict[str, Any]) -> Planned:
    """What the launcher of an op launches for these operands; UsageError for what it does not take."""
    from llmq.ops import on_cuda

    slots = count()  # in the order of the tensors of `run`

    def array(tensor: torch.Tensor, form: Form | None = None) -> Any:
        strides = tuple(step * tensor.element_size() for step in tensor.stride())
        return on_cuda.stand_in(next(slots), tuple(tensor.shape), NAMES[tensor.dtype], strides)

    handles = [*(_output(y, array) for y in outputs), *(_input(x, array) for x in inputs)]
    return Planned(*on_cuda.launches(op, handles, numbers, next(slots)))
