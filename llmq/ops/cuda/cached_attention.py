"""Attention to a cache on the GPU, and what fills the cache; see cuda/cached_attention.cu and cuda/cache_write.cu."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llmq.errors import UsageError
from llmq.operands import Output, Tensor
from llmq.ops.cuda import launch as gpu
from llmq.ops.cuda.compile import Constants
from llmq.ops.seam import Arguments

THREADS, MOST_SHARED = 256, 98 * 1024
MOST_HEAD_BYTES = 1024


def cache_write(
    cache: Output, /, rot: Tensor, positions: Tensor, sequences: Tensor, *, num_heads: int, num_kv_heads: int
) -> None:
    """cache (B,S,2*Hkv*Hd) <- rot (R,T,(Hq+2Hkv)*Hd), positions, sequences (R,T) int32; the rest of cache stays."""
    if not cache.wanted:
        return
    kind, width, kept = gpu.type_of(rot), rot.shape[-1], cache.shape[-1]
    assert gpu.type_of(cache) == kind
    constants: Constants = {"T": kind, "WIDTH": width, "KEPT": kept, "N": gpu.access(math.gcd(width, kept), kind)}
    arguments = (cache, rot, positions, sequences, np.int64(cache.shape[1]))
    gpu.launch("cache_write", "cache_write", gpu.rows_of(rot.shape), 128, arguments, constants)


def attention_cached(
    *operands: Any, num_heads: int, num_kv_heads: int, window: int | None, softmax_scale: float, scratch: Any = None
) -> None:
    """att (B,1,Hq*Hd), new_cache (B,S,2*Hkv*Hd) <- qkv (B,1,(Hq+2Hkv)*Hd), cache like new_cache, table (S,Hd) fp32,
    positions (B,1) int32. Of a cache that is not in the memory of the new one, all is copied."""
    att, new_cache, qkv, cache, table, positions = operands
    kind, (batch, length, kept) = gpu.type_of(qkv), cache.shape
    head_dim, group = kept // (2 * num_kv_heads), num_heads // num_kv_heads
    _check(kind, head_dim, group, batch)
    assert gpu.type_of(att) == gpu.type_of(new_cache) == kind and gpu.type_of(table) == "float"
    assert att.wanted and new_cache.wanted, f"{att.name}: a token's attention is made together with its cache"
    copied = gpu.plain(new_cache) != gpu.pointer(cache)
    if copied:
        new_cache.tensors[0].array[...] = cache.array
    sizes: Constants = {"HD": head_dim, "GROUP": group, "KV_HEADS": num_kv_heads, "KEYS": _keys(kind, head_dim)}
    constants: Constants = {"T": kind, **sizes, "N": gpu.access(head_dim, kind), "PLACES": batch * num_kv_heads}
    pieces = _pieces(kind, head_dim, length)
    parts = gpu.room(scratch, 4 * batch * num_heads * pieces * (head_dim + 2))
    numbers = (np.int32(length), np.int32(min(window or length, length)), np.float32(softmax_scale))
    arguments = (att, new_cache, parts, qkv, table, positions, *numbers)
    grid, shared = (pieces, num_kv_heads, batch), _shared_bytes(kind, head_dim, group)
    # What it reads early are the positions, which a step leaves for the next one, and what earlier steps cached.
    gpu.launch("cached_attention", "attend", grid, THREADS, arguments, constants, shared_bytes=shared, early=not copied)


def _keys(kind: str, head_dim: int) -> int:
    """Positions of a piece: as many as two tiles of them have room in shared memory."""
    return 64 if head_dim * gpu.size_of(kind) <= MOST_HEAD_BYTES // 2 else 32


def _pieces(kind: str, head_dim: int, length: int) -> int:
    return -(-length // _keys(kind, head_dim))


def _shared_bytes(kind: str, head_dim: int, group: int) -> int:
    keys = _keys(kind, head_dim)
    return (
        2 * keys * (head_dim + gpu.access(head_dim, kind)) * gpu.size_of(kind) + 4 * group * (head_dim + keys + 2) + 4
    )


def _check(kind: str, head_dim: int, group: int, batch: int) -> None:
    """UsageError for what the kernels do not take."""
    if head_dim * gpu.size_of(kind) > MOST_HEAD_BYTES or _shared_bytes(kind, head_dim, group) > MOST_SHARED:
        raise UsageError(
            f"generation on the GPU has no room in shared memory for {group} query heads of {head_dim} per key head: "
            "use --device cpu"
        )
    if batch > gpu.GRID_SIDE:
        raise UsageError(
            f"generation takes {gpu.GRID_SIDE} sequences at a time, not {batch}: use a smaller --batch-size"
        )


def _facts(call: Arguments) -> tuple[str, int, int, int, int]:
    """Type, head_dim, query heads per key head, sequences and length of a call's cache."""
    cache, kv_heads = call.reads["cache"], call.numbers["num_kv_heads"]
    batch, length, kept = cache.shape
    kind = gpu.kind_of(cache.dtype, cache.name)
    return kind, kept // (2 * kv_heads), call.numbers["num_heads"] // kv_heads, batch, length


def _refuse(call: Arguments, capability: int) -> None:
    kind, head_dim, group, batch, _ = _facts(call)
    _check(kind, head_dim, group, batch)


def _scratch_bytes(call: Arguments) -> int:
    kind, head_dim, _, batch, length = _facts(call)
    return 4 * batch * int(call.numbers["num_heads"]) * _pieces(kind, head_dim, length) * (head_dim + 2)


KERNELS = (gpu.Kernel(cache_write), gpu.Kernel(attention_cached, _scratch_bytes, _refuse))
