"""Causal attention on the GPU: cuDNN for bf16, our own exact kernels for f32, there to check the rest with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.ops.cuda.cudnn import AttentionPlan, AttentionShape, Cudnn
from llmq.ops.cuda.launch import GRID_SIDE, launch
from llmq.tensor import DTYPES, Output, Tensor

ROWS, TILE, WARPS = 16, 32, 4  # cuda/attention.cu
MAX_EXACT_HEAD_DIM = 256  # of the f32 kernels: four tiles of it fit the 99 KiB that every GPU has


@dataclass(frozen=True)
class Attention:
    """What attention needs beyond its arguments: cuDNN, and `take(num_bytes)`, which gives the address of scratch."""

    cudnn: Cudnn
    take: Callable[[int], int]


def attention_forward(
    attention: Attention,
    att: Output,
    lse: Output,
    /,
    qkv: Tensor,
    borders: Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    longest: int | None,
    softmax_scale: float,
) -> None:
    """att (B,T,Hq*Hd), lse (B,Hq,T) <- qkv (B,T,(Hq+2Hkv)*Hd); lse = log(sum over seen keys of exp(scale * q k)).

    `borders` (B,D+1) int32: the first tokens of a row's documents, ascending from 0, then T repeated; None: each row is
    one document. What is longer than `longest` tokens is cut into as many documents. lse is (B,T,Hq) where there are
    borders.
    """
    shape = _shape(
        qkv.shape, borders.shape if borders else None, num_heads, num_kv_heads, window, longest, softmax_scale
    )
    if not att.wanted and not lse.wanted:
        return
    if is_exact(qkv.array.dtype):
        _launch("attention_forward", shape, shape.num_heads, _plain(att), _plain(lse), qkv, borders)
        return
    plan = attention.cudnn.plan("forward" if lse.wanted else "evaluate", shape)
    places, own = _places_bytes(shape), 0 if att.wanted else _att_bytes(shape)
    needed = places + own + plan.workspace_bytes
    scratch = attention.take(needed) if needed else 0
    pointers = {**_packed(shape, qkv.array), "att": _plain(att) or scratch + places}
    if lse.wanted:
        pointers["lse"] = _plain(lse)
    attention.cudnn.run(plan, pointers | _find_documents(shape, borders, scratch), scratch + places + own)


def attention_backward(
    attention: Attention,
    d_qkv: Output,
    /,
    d_att: Tensor,
    qkv: Tensor,
    att: Tensor,
    lse: Tensor,
    borders: Tensor | None,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    longest: int | None,
    softmax_scale: float,
) -> None:
    """d_qkv (B,T,(Hq+2Hkv)*Hd) <- d_att (B,T,Hq*Hd), qkv like d_qkv, att like d_att, lse and borders as in forward."""
    if not d_qkv.wanted:
        return
    assert not d_qkv.accumulate, "gradients of activations are written, not added to"
    shape = _shape(
        qkv.shape, borders.shape if borders else None, num_heads, num_kv_heads, window, longest, softmax_scale
    )
    (target,) = d_qkv.tensors
    if is_exact(qkv.array.dtype):
        dots = attention.take(_dots_bytes(shape))
        _launch("attention_backward_q", shape, shape.num_heads, target, d_att, qkv, att, lse, borders, dots)
        _launch("attention_backward_kv", shape, shape.num_kv_heads, target, d_att, qkv, lse, borders, dots)
        return
    plan, places = attention.cudnn.plan("backward", shape), _places_bytes(shape)
    scratch = attention.take(places + plan.workspace_bytes) if places + plan.workspace_bytes else 0
    pointers = {name: _address(x) for name, x in (("d_att", d_att), ("att", att), ("lse", lse))}
    pointers |= _packed(shape, qkv.array) | _packed(shape, target.array, "d_")
    attention.cudnn.run(plan, pointers | _find_documents(shape, borders, scratch), scratch + places)


def attention_ops(attention: Attention) -> dict[str, Callable[..., None]]:
    """The two ops, with the reference's signatures."""
    return {op.__name__: partial(op, attention) for op in (attention_forward, attention_backward)}


def attention_scratch(
    attention: Attention,
    op: str,
    qkv: tuple[int, ...],
    borders: tuple[int, ...] | None,
    dtype: str,
    numbers: Mapping[str, Any],
    wanted: tuple[bool, ...],
) -> int:
    """Bytes of scratch of a call: shapes of `qkv` and `borders`, `wanted` outputs. UsageError for what the GPU lacks.

    Builds the plan of a bf16 call, so this is also where a head_dim is refused before anything is allocated.
    """
    shape = _shape(qkv, borders, **numbers)
    if not any(wanted):
        return 0
    if is_exact(DTYPES[dtype]):
        return exact_scratch(op, qkv, borders, numbers)
    if op == "attention_backward":
        return _places_bytes(shape) + attention.cudnn.plan("backward", shape).workspace_bytes
    att, lse = wanted
    plan: AttentionPlan = attention.cudnn.plan("forward" if lse else "evaluate", shape)
    return _places_bytes(shape) + (0 if att else _att_bytes(shape)) + plan.workspace_bytes


def exact_scratch(op: str, qkv: tuple[int, ...], borders: tuple[int, ...] | None, numbers: Mapping[str, Any]) -> int:
    """Bytes of scratch of a call in f32, which takes no cuDNN. UsageError for shapes that our kernels do not take."""
    shape = _shape(qkv, borders, **numbers)
    _check_exact(shape)
    return _dots_bytes(shape) if op == "attention_backward" else 0


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


def is_exact(dtype: np.dtype) -> bool:
    """Whether our own f32 kernels run; UsageError for what neither they nor cuDNN take."""
    if dtype not in (DTYPES["fp32"], DTYPES["bf16"]):
        raise UsageError(f"attention on the GPU reads bf16 or fp32, not {dtype}: use --device cpu")
    return dtype == DTYPES["fp32"]


def _check_exact(shape: AttentionShape) -> None:
    if shape.head_dim > MAX_EXACT_HEAD_DIM:
        raise UsageError(
            f"attention in fp32 on the GPU takes a head_dim up to {MAX_EXACT_HEAD_DIM}, not {shape.head_dim}: "
            "use --model-dtype bf16 or --device cpu"
        )
    if shape.batch > GRID_SIDE:
        raise UsageError(
            f"attention in fp32 on the GPU takes micro-batches of {GRID_SIDE} sequences at most, not {shape.batch}: "
            "use a smaller --batch-size with more --grad-accumulation"
        )


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


def _find_documents(shape: AttentionShape, borders: Tensor | None, scratch: int) -> dict[str, int]:
    """Writes where the documents lie to `scratch`, and returns the addresses; nothing for dense rows.

    Once per call, 2 us: the arrays of a piece of the batch count from its own start, and no slot has to hold them.
    """
    if borders is None:
        return {}
    addresses = {}
    for name, size in _places_parts(shape).items():
        addresses[name] = scratch
        scratch += size
    widths = {"QKV": shape.packed, "ATT": shape.num_heads * shape.head_dim, "LSE": shape.num_heads}
    numbers = map(np.int32, (shape.batch, borders.shape[1] - 1, shape.places, shape.length, shape.extent))
    arguments = (*addresses.values(), _address(borders), *numbers)
    launch("documents", "document_offsets", shape.batch, 32, arguments, widths)
    return addresses


def _packed(shape: AttentionShape, array: Any, prefix: str = "") -> dict[str, int]:
    start = int(array.data.ptr)
    return {prefix + name: start + 2 * offset for name, offset in zip("qkv", shape.offsets(), strict=True)}


def _address(tensor: Tensor) -> int:
    array: Any = tensor.array
    return int(array.data.ptr)


def _plain(output: Output) -> int:
    """Address of an output, 0 if nobody reads it."""
    if not output.wanted:
        return 0
    (target,) = output.tensors
    assert target.form is None and not output.accumulate, f"{output.name}: attention writes the value only"
    return _address(target)


def _launch(entry: str, shape: AttentionShape, heads: int, *arguments: Tensor | int | None) -> None:
    """One f32 kernel: a block per tile of rows, head and sequence."""
    _check_exact(shape)
    constants = {"HD": shape.head_dim, "GROUP": shape.num_heads // shape.num_kv_heads, "KV_HEADS": shape.num_kv_heads}
    constants["PACKED"] = int(shape.max_docs is not None)
    pointers = [x if isinstance(x, int) else _address(x) if x else 0 for x in arguments]
    sizes = (shape.max_docs or 1, shape.extent, shape.length, shape.window or shape.length)
    numbers = (*map(np.int32, sizes), np.float32(shape.softmax_scale))
    grid = (-(-shape.length // ROWS), heads, shape.batch)
    shared = 4 * (2 * TILE * (shape.head_dim + 1) + 2 * ROWS * shape.head_dim)
    launch("attention", entry, grid, 32 * WARPS, (*pointers, *numbers), constants, shared_bytes=shared)
