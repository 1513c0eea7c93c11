"""Causal attention on the GPU: cuDNN for bf16, our own exact kernels for f32, there to check the rest with."""

from functools import partial
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.cudnn import AttentionShape, Cudnn
from llmq.ops.seam import Arguments
from llmq.tensor import DTYPES

ROWS, TILE, WARPS = 16, 32, 4  # cuda/attention.cu
MAX_EXACT_HEAD_DIM = 256  # of the f32 kernels: four tiles of it fit the 99 KiB that every GPU has


def attention_forward(
    cudnn: Cudnn, att: Output, lse: Output, /, *read: Any, scratch: Any = None, **numbers: Any
) -> None:
    """att (B,T,Hq*Hd), lse (B,Hq,T) <- qkv (B,T,(Hq+2Hkv)*Hd); lse = log(sum over seen keys of exp(scale * q k)).

    `borders` (B,D+1) int32: the first tokens of a row's documents, ascending from 0, then T repeated; None: each row is
    one document. What is longer than `longest` tokens is cut into as many documents. lse is (B,T,Hq) where there are
    borders.
    """
    qkv, borders = read
    shape = _shape(qkv.shape, borders.shape if borders else None, **numbers)
    if _is_exact(qkv.array.dtype):
        _launch("attention_forward", shape, shape.num_heads, _plain(att), _plain(lse), qkv, borders)
        return
    plan = cudnn.plan("forward" if lse.wanted else "evaluate", shape)
    places, own = _places_bytes(shape), 0 if att.wanted else _att_bytes(shape)
    start = gpu.room(scratch, places + own + plan.workspace_bytes)
    pointers = {**_packed(shape, qkv.array), "att": _plain(att) or start + places}
    if lse.wanted:
        pointers["lse"] = _plain(lse)
    cudnn.run(plan, pointers | _find_documents(shape, borders, start), start + places + own)


def attention_backward(cudnn: Cudnn, d_qkv: Output, /, *read: Any, scratch: Any = None, **numbers: Any) -> None:
    """d_qkv (B,T,(Hq+2Hkv)*Hd) <- d_att (B,T,Hq*Hd), qkv like d_qkv, att like d_att, lse and borders as in forward."""
    d_att, qkv, att, lse, borders = read
    assert not d_qkv.accumulate, "gradients of activations are written, not added to"
    shape = _shape(qkv.shape, borders.shape if borders else None, **numbers)
    (target,) = d_qkv.tensors
    if _is_exact(qkv.array.dtype):
        dots = gpu.room(scratch, _dots_bytes(shape))
        _launch("attention_backward_q", shape, shape.num_heads, target, d_att, qkv, att, lse, borders, dots)
        _launch("attention_backward_kv", shape, shape.num_kv_heads, target, d_att, qkv, lse, borders, dots)
        return
    plan, places = cudnn.plan("backward", shape), _places_bytes(shape)
    start = gpu.room(scratch, places + plan.workspace_bytes)
    pointers = {name: _address(x) for name, x in (("d_att", d_att), ("att", att), ("lse", lse))}
    pointers |= _packed(shape, qkv.array) | _packed(shape, target.array, "d_")
    cudnn.run(plan, pointers | _find_documents(shape, borders, start), start + places)


def attention_kernels(cudnn: Cudnn | None) -> dict[str, gpu.Kernel]:
    """The two ops; None: in f32, which takes no cuDNN.

    What a bf16 call needs is read off its plan, so this is also where cuDNN refuses a head_dim, before anything is
    allocated.
    """
    ops: tuple[Any, ...] = ((attention_forward, _forward_scratch), (attention_backward, _backward_scratch))
    return {op.__name__: gpu.Kernel(partial(op, cudnn), partial(scratch, cudnn), _refuse) for op, scratch in ops}


def _forward_scratch(cudnn: Cudnn, call: Arguments) -> int:
    if is_exact(call):
        return 0
    shape = _shape_of(call)
    plan = cudnn.plan("forward" if call.writes.get("lse") else "evaluate", shape)
    return _places_bytes(shape) + (0 if call.writes.get("att") else _att_bytes(shape)) + plan.workspace_bytes


def _backward_scratch(cudnn: Cudnn, call: Arguments) -> int:
    shape = _shape_of(call)
    if is_exact(call):
        return _dots_bytes(shape)
    return _places_bytes(shape) + cudnn.plan("backward", shape).workspace_bytes


def _refuse(call: Arguments, capability: int) -> None:
    """UsageError for what the f32 kernels do not take; cuDNN refuses when its plan is made."""
    shape = _shape_of(call)
    if not is_exact(call):
        return
    if shape.head_dim > MAX_EXACT_HEAD_DIM:
        raise UsageError(
            f"attention in fp32 on the GPU takes a head_dim up to {MAX_EXACT_HEAD_DIM}, not {shape.head_dim}: "
            "use --model-dtype bf16 or --device cpu"
        )
    if shape.batch > gpu.GRID_SIDE:
        raise UsageError(
            f"attention in fp32 on the GPU takes micro-batches of {gpu.GRID_SIDE} sequences at most, not "
            f"{shape.batch}: use a smaller --batch-size with more --grad-accumulation"
        )


def is_exact(call: Arguments) -> bool:
    """Whether a call runs our own f32 kernels; UsageError for what neither they nor cuDNN take."""
    return _is_exact(DTYPES[call.reads["qkv"].dtype])


def _shape_of(call: Arguments) -> AttentionShape:
    borders = call.reads.get("borders")
    return _shape(call.reads["qkv"].shape, borders.shape if borders else None, **call.numbers)


def _shape(
    qkv: tuple[int, ...],
    borders: tuple[int, ...] | None,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    longest: int | None,
    softmax_scale: float,
) -> AttentionShape:
    batch, length, width = qkv
    window = None if window is None or window >= (longest or length) else window
    head_dim = width // (num_heads + 2 * num_kv_heads)
    max_docs = None if borders is None else borders[1] - 1
    return AttentionShape(batch, length, num_heads, num_kv_heads, head_dim, window, softmax_scale, max_docs, longest)


def _is_exact(dtype: np.dtype) -> bool:
    if dtype not in (DTYPES["fp32"], DTYPES["bf16"]):
        raise UsageError(f"attention on the GPU reads bf16 or fp32, not {dtype}: use --device cpu")
    return dtype == DTYPES["fp32"]


def _att_bytes(shape: AttentionShape) -> int:
    """Bytes of att in bf16, aligned."""
    return -(-shape.batch * shape.length * shape.num_heads * shape.head_dim * 2 // 256) * 256


def _dots_bytes(shape: AttentionShape) -> int:
    """Bytes of the f32 sums of d_att * att, one per query and head."""
    return shape.batch * shape.num_heads * shape.length * 4


def _places_parts(shape: AttentionShape) -> dict[str, int]:
    """Bytes of what `_find_documents` writes, aligned, by the name that cuDNN's graph has for it."""
    if shape.max_docs is None:
        return {}
    sizes = {"lengths": 4, "qkv_offsets": 8, "att_offsets": 8, "lse_offsets": 8}
    return {name: -(-(shape.num_documents + 1) * size // 256) * 256 for name, size in sizes.items()}


def _places_bytes(shape: AttentionShape) -> int:
    return sum(_places_parts(shape).values())


def _find_documents(shape: AttentionShape, borders: Tensor | None, start: int) -> dict[str, int]:
    """Writes where the documents lie, from the address `start` on, and returns the addresses; nothing for dense rows.

    Once per call, 2 us: the arrays of a piece of the batch count from its own start, and no slot has to hold them.
    """
    if borders is None:
        return {}
    addresses = {}
    for name, size in _places_parts(shape).items():
        addresses[name] = start
        start += size
    widths = {"QKV": shape.packed, "ATT": shape.num_heads * shape.head_dim, "LSE": shape.num_heads}
    numbers = map(np.int32, (shape.batch, borders.shape[1] - 1, shape.places, shape.length, shape.extent))
    arguments = (*addresses.values(), _address(borders), *numbers)
    gpu.launch("documents", "document_offsets", shape.batch, 32, arguments, widths)
    return addresses


def _packed(shape: AttentionShape, array: Any, prefix: str = "") -> dict[str, int]:
    start = int(array.data.ptr)
    return {prefix + name: start + 2 * offset for name, offset in zip("qkv", shape.offsets(), strict=True)}


def _address(tensor: Tensor) -> int:
    array: Any = tensor.array
    return int(array.data.ptr)


def _plain(output: Output) -> int:
    """Address of an output, 0 if it is not read."""
    if not output.wanted:
        return 0
    (target,) = output.tensors
    assert target.form is None and not output.accumulate, f"{output.name}: attention writes the value only"
    return _address(target)


def _launch(entry: str, shape: AttentionShape, heads: int, *arguments: Tensor | int | None) -> None:
    """One f32 kernel: a block per tile of rows, head and sequence."""
    constants = {"HD": shape.head_dim, "GROUP": shape.num_heads // shape.num_kv_heads, "KV_HEADS": shape.num_kv_heads}
    constants["PACKED"] = int(shape.max_docs is not None)
    pointers = [x if isinstance(x, int) else _address(x) if x else 0 for x in arguments]
    sizes = (shape.max_docs or 1, shape.extent, shape.length, shape.window or shape.length)
    numbers = (*map(np.int32, sizes), np.float32(shape.softmax_scale))
    grid = (-(-shape.length // ROWS), heads, shape.batch)
    shared = 4 * (2 * TILE * (shape.head_dim + 1) + 2 * ROWS * shape.head_dim)
    gpu.launch("attention", entry, grid, 32 * WARPS, (*pointers, *numbers), constants, shared_bytes=shared)
