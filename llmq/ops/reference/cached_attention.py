"""Attention of one new token per sequence to a cache of keys and values, and what fills the cache.

A cache (B,S,2*Hkv*Hd) has for each sequence and position the key heads, then the value heads, as they lie in the
packed row of q, k and v after the rotary embedding.
"""

import numpy as np

from llmq.ops.seam import Arguments, op
from llmq.tensor import Output, Tensor, round_to


@op(family="copies")
def cache_write(
    cache: Output, /, rot: Tensor, positions: Tensor, sequences: Tensor, *, num_heads: int, num_kv_heads: int
) -> None:
    """cache (B,S,2*Hkv*Hd) <- rot (R,T,(Hq+2Hkv)*Hd), positions, sequences (R,T) int32; the rest of cache stays.

    cache[sequences[r,t], positions[r,t]] = the keys and values of rot[r,t]; a negative sequence is padding. No two
    tokens have the same place.
    """
    if not cache.wanted:
        return
    (target,) = cache.tensors
    packed = rot.read()
    there, width = sequences.read() >= 0, cache.shape[-1]
    rows = round_to(packed[there][:, packed.shape[-1] - width :], cache.dtype)
    target.array[sequences.read()[there], positions.read()[there]] = rows


def _multiply_adds(call: Arguments) -> int:
    """Of one product, with all of the cache in use."""
    b, _, width = call.reads["rot"].shape
    heads, kv_heads = call.numbers["num_heads"], call.numbers["num_kv_heads"]
    length = call.reads["cache"].shape[1]
    return int(b * heads * (width // (heads + 2 * kv_heads)) * min(length, call.numbers["window"] or length))


@op(family="attention forward", products=2, multiply_adds=_multiply_adds)
def attention_cached(
    att: Output,
    /,
    rot: Tensor,
    cache: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    softmax_scale: float,
) -> None:
    """att (B,1,Hq*Hd) <- rot (B,1,(Hq+2Hkv)*Hd), cache (B,S,2*Hkv*Hd), positions (B,1) int32.

    The query of sequence b, at i = positions[b], sees the keys j of its cache with i - window < j <= i (no window: all
    j <= i), its own among them. Query head h reads key and value head h // (Hq / Hkv).
    """
    packed, held = rot.read(), cache.read()
    b, _, width = packed.shape
    head_dim = width // (num_heads + 2 * num_kv_heads)
    q = packed[:, 0, : num_heads * head_dim].reshape(b, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = np.empty(q.shape, q.dtype)
    for sequence, last in enumerate(positions.read()[:, 0]):
        seen = slice(max(0, last + 1 - (window or last + 1)), last + 1)
        k, v = held[sequence, seen].reshape(-1, 2, num_kv_heads, head_dim).transpose(1, 2, 0, 3)  # (Hkv,keys,Hd)
        scores = q[sequence] @ k.transpose(0, 2, 1) * q.dtype.type(softmax_scale)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[sequence] = p @ v / p.sum(axis=-1, keepdims=True)
    att.write(out.reshape(b, 1, -1))
